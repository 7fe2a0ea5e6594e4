#include "process_group/liveness.h"

#include "base/text.h"

namespace fsdp::detail {

namespace {

constexpr auto kPatience = std::chrono::milliseconds(500);

Fd connect_to_peer(const std::string& endpoint) {
  const auto parts = split(endpoint, ' ');
  const auto port = static_cast<uint16_t>(parse_int(parts.at(1), "a peer's port"));
  return connect_to(parts.at(0), port, kPatience);
}

} // namespace

Liveness::Liveness(const std::string& address)
    : address_(address), listener_(listen_on(address, 0)) {}

std::string Liveness::endpoint() const {
  return address_ + " " + std::to_string(listener_.port);
}

void Liveness::set_peers(std::vector<std::string> endpoints) {
  endpoints_ = std::move(endpoints);
  connections_.resize(endpoints_.size());
}

bool Liveness::answers(int rank) {
  const std::lock_guard lock(mutex_);
  auto& connection = connections_.at(static_cast<size_t>(rank));
  if (!is_connected(connection)) {
    connection = connect_to_peer(endpoints_.at(static_cast<size_t>(rank)));
  }
  return connection.get() >= 0;
}

std::vector<int> Liveness::gone() {
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(endpoints_.size()); ++rank) {
    if (!answers(rank)) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

} // namespace fsdp::detail
