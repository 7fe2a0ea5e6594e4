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

/// Whether every address of `host` is one of this machine's loopback.
bool is_loopback(const std::string& host);

struct Listener {
  Fd fd;
  uint16_t port = 0;
};

/// Listens on `host`, or on all addresses when it is ""; port 0 picks one.
/// Throws CommError that says so when the port is taken.
Listener listen_on(const std::string& host, uint16_t port);

/// The address that this machine shows to `host`.
std::string address_towards(const std::string& host);

/// Whether somebody listens at an IP address: false at once when refused.
bool can_connect(const std::string& address, uint16_t port, std::chrono::milliseconds timeout);

} // namespace fsdp::detail
