#include "launch/liveness.h"

#include <poll.h>
#include <sys/socket.h>

#include "base/text.h"

namespace fsdp::detail {

namespace {

constexpr auto kAnswerWithin = std::chrono::milliseconds(500);

} // namespace

Liveness::Liveness(const std::string& address)
    : address_(address), listener_(listen_on(address, 0)) {}

std::string Liveness::endpoint() const {
  return address_ + " " + std::to_string(listener_.port);
}

void Liveness::set_peers(const std::vector<std::string>& endpoints) {
  connections_.resize(endpoints.size());
  std::vector<Fd> begun; // closed at the end: is_gone connects again
  for (const auto& endpoint : endpoints) {
    const auto parts = split(endpoint, ' ');
    const auto port = static_cast<uint16_t>(parse_int(parts.at(1), "a peer's port"));
    peers_.push_back({parts[0], port});
    begun.push_back(begin_connect(parts[0], port));
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
    connection = connect_to(peers_[index].host, peers_[index].port, kAnswerWithin);
  }
  return connection.get() < 0;
}

std::vector<int> Liveness::gone() {
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if (is_gone(rank)) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

} // namespace fsdp::detail
