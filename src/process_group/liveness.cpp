#include "process_group/liveness.h"

#include "base/text.h"

namespace fsdp::detail {

namespace {

constexpr auto kPatience = std::chrono::milliseconds(500);

bool answers(const std::string& endpoint) {
  const auto parts = split(endpoint, ' ');
  const auto port = static_cast<uint16_t>(parse_int(parts.at(1), "a peer's port"));
  return can_connect(parts.at(0), port, kPatience);
}

} // namespace

Liveness::Liveness(const std::string& address)
    : address_(address), listener_(listen_on(address, 0)) {}

std::string Liveness::endpoint() const {
  return address_ + " " + std::to_string(listener_.port);
}

void Liveness::set_peers(std::vector<std::string> endpoints) {
  endpoints_ = std::move(endpoints);
}

std::vector<int> Liveness::gone() const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < endpoints_.size(); ++rank) {
    if (!answers(endpoints_[rank])) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return ranks;
}

} // namespace fsdp::detail
