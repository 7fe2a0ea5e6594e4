#include "base/fd.h"

#include <unistd.h>

namespace fsdp::detail {

Fd& Fd::operator=(Fd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Fd::~Fd() {
  if (fd_ >= 0) {
    close(fd_);
  }
}

} // namespace fsdp::detail
