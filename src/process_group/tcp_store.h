#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>

namespace fsdp::detail {

struct Endpoint {
  std::string host;
  uint16_t port = 0;
};

/// "host:port", or "[v6 address]:port". Errors name `what`.
Endpoint parse_endpoint(const std::string& text, const std::string& what);

/// Serves a store at `endpoint`, on the loopback address only for one machine;
/// c10d's own would listen on every address. Fills in the host and a free port
/// where `endpoint` has none. The store lives as long as the process, and the
/// same port gives the same store again.
c10::intrusive_ptr<c10d::Store> serve_store(Endpoint& endpoint, bool one_machine);

/// The store that somebody serves there, or will within `timeout`. Both make
/// the process ignore SIGPIPE where it was not handled.
c10::intrusive_ptr<c10d::Store> connect_store(
    const Endpoint& endpoint, std::chrono::milliseconds timeout);

} // namespace fsdp::detail
