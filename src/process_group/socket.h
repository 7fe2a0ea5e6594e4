#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace fsdp::detail {

/// A file descriptor, closed at the end.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd();

  int get() const {
    return fd_;
  }
  int release() {
    return std::exchange(fd_, -1);
  }

 private:
  int fd_;
};

/// Whether `host` says "this machine": localhost or a loopback address.
bool is_loopback(const std::string& host);

struct Listener {
  Fd fd;
  uint16_t port = 0;
};

/// Listens on `host`, or on all addresses when it is ""; port 0 picks one.
/// Throws CommError that says so when the port is taken.
Listener listen_on(const std::string& host, uint16_t port);

/// An address under which other machines reach this one: the one on the way to
/// `peer`, or any where `peer` is empty or this machine itself.
std::string address_for_peers(const std::string& peer);

/// A connection to who listens at an address of `host`, or -1: at once when refused.
Fd connect_to(const std::string& host, uint16_t port, std::chrono::milliseconds timeout);
/// In two steps, for many at once and numeric addresses: one that may not be made yet, or
/// -1; and whether it is, by a deadline.
Fd begin_connect(const std::string& address, uint16_t port);
bool is_made(const Fd& connection, std::chrono::steady_clock::time_point deadline);
/// Whether it is still there; for one on which nobody sends.
bool is_connected(const Fd& connection);

} // namespace fsdp::detail
