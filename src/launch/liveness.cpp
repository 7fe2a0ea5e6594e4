#include "launch/liveness.h"

#include <poll.h>
#include <sys/socket.h>

#include "base/text.h"

namespace fsdp::detail {

namespace {

constexpr auto kAnswerWithin = std::chrono::milliseconds(500);

struct Address {
  explicit Address(const std::string& endpoint) {
    const auto parts = split(endpoint, ' ');
    host = parts.at(0);
    port = static_cast<uint16_t>(parse_int(parts.at(1), "a peer's port"));
  }

  std::string host;
  uint16_t port = 0;
};

} // namespace

Liveness::Liveness(const std::string& address)
    : address_(address), listener_(listen_on(address, 0)) {}

std::string Liveness::endpoint() const {
  return address_ + " " + std::to_string(listener_.port);
}

void Liveness::set_peers(std::vector<std::string> endpoints) {
  endpoints_ = std::move(endpoints);
  connections_.resize(endpoints_.size());
  std::vector<Fd> begun; // closed at the end: is_gone connects again
  for (const auto& endpoint : endpoints_) {
    const Address peer(endpoint);
    begun.push_back(begin_connect(peer.host, peer.port));
  }
  const auto deadline = std::chrono::steady_clock::now() + kAnswerWithin;
  for (const auto& connection : begun) {
    answered_.push_back(wait_connected(connection, deadline));
  }
  close_accepted();
}

/// Closes the connections that the kernel has accepted for this rank. A peer learns
/// from the accept that this rank is alive, and waiting connections would fill the queue.
void Liveness::close_accepted() const {
  pollfd waiting{.fd = listener_.fd.get(), .events = POLLIN, .revents = 0};
  while (poll(&waiting, 1, 0) == 1) {
    const Fd caller(accept4(waiting.fd, nullptr, nullptr, SOCK_CLOEXEC));
    if (caller.get() < 0) {
      return;
    }
  }
}

bool Liveness::is_gone(int rank) {
  const auto index = static_cast<size_t>(rank);
  if (!answered_.at(index)) {
    return false;
  }
  const std::lock_guard lock(mutex_);
  close_accepted();
  auto& connection = connections_.at(index);
  if (!is_connected(connection)) {
    const Address peer(endpoints_[index]);
    connection = connect_to(peer.host, peer.port, kAnswerWithin);
  }
  return connection.get() < 0;
}

std::vector<int> Liveness::gone() {
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(endpoints_.size()); ++rank) {
    if (is_gone(rank)) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

} // namespace fsdp::detail
