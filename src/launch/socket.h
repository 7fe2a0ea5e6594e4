#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "base/fd.h"

namespace fsdp::detail {

/// Returns true if `host` is "localhost" or a loopback address.
bool is_loopback(const std::string& host);

struct Endpoint {
  std::string host;
  uint16_t port = 0;
};

struct Listener {
  Fd fd;
  uint16_t port = 0;
};

/// Listens on `host`, or on all addresses if `host` is "". Port 0 picks a free one.
/// Throws CommError; the message says so if the port is in use.
Listener listen_on(const std::string& host, uint16_t port);

/// Returns an address under which other machines reach this one: the source address of the route to
/// `peer`. Any other address than loopback if `peer` is "" or loopback.
std::string address_for_peers(const std::string& peer);

/// Connects to a listening socket of `host`. Returns -1 if the connection is refused
/// or not made within `timeout`. Throws CommError if `host` cannot be resolved.
Fd connect_to(const std::string& host, uint16_t port, std::chrono::milliseconds timeout);
/// Begins to connect to a numeric address, or returns -1. For many connections at
/// once; `wait_connected` waits for one of them.
Fd begin_connect(const std::string& address, uint16_t port);
/// Waits until the connection is made. Returns false if it fails or the deadline passes.
bool wait_connected(const Fd& connection, std::chrono::steady_clock::time_point deadline);
/// Returns true if the connection still exists. The peer must never send on it.
bool is_connected(const Fd& connection);

} // namespace fsdp::detail
