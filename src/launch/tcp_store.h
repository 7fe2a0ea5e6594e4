#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

#include "launch/socket.h"

namespace fsdp::detail {

/// Parses "host:port" or "[v6 address]:port". Errors name `what`.
Endpoint parse_endpoint(const std::string& text, const std::string& what);

/// Serves a store at the port of `endpoint`, or at a free port if it is 0, and fills
/// in that port. With `one_machine` the store listens on the loopback address only,
/// which becomes the host; c10d by itself would listen on every address. The store
/// lives as long as the process: the same port gives the same store again.
/// Both functions make the process ignore SIGPIPE unless it has a handler.
c10::intrusive_ptr<c10d::Store> serve_store(Endpoint& endpoint, bool one_machine);

/// Connects to the store at `endpoint`. Waits up to `timeout` for its server, then
/// throws CommError.
c10::intrusive_ptr<c10d::Store> connect_store(
    const Endpoint& endpoint, std::chrono::milliseconds timeout);

} // namespace fsdp::detail
