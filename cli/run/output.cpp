#include "cli/run/output.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace fsdp::cli {

namespace {

constexpr size_t kMostWaiting = 1 << 20;

/// A new descriptor for the file of `fd`. A pipe or terminal is opened again without blocking, so
/// that programs that share `fd` keep a blocking one.
int own_descriptor(int fd) {
  struct stat info{};
  if (fstat(fd, &info) == 0 && (S_ISFIFO(info.st_mode) || isatty(fd))) {
    const auto path = "/proc/self/fd/" + std::to_string(fd);
    const int own = open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (own >= 0) {
      return own;
    }
  }
  return fcntl(fd, F_DUPFD_CLOEXEC, 3);
}

} // namespace

Output::Output() {
  for (int stream = 0; stream < 2; ++stream) {
    streams_[stream].fd = own_descriptor(stream + 1);
  }
}

Output::~Output() {
  for (const auto& stream : streams_) {
    close(stream.fd);
  }
}

void Output::add(int stream, const std::string& text) {
  if (streams_[stream].fd >= 0) {
    streams_[stream].text += text;
  }
}

bool Output::full(int stream) const {
  return streams_[stream].text.size() > kMostWaiting;
}

void Output::flush() {
  for (auto& [fd, text] : streams_) {
    size_t done = 0;
    pollfd ready{.fd = fd, .events = POLLOUT, .revents = 0};
    while (done < text.size() && poll(&ready, 1, 0) > 0) {
      // A pipe takes PIPE_BUF bytes in one piece. Each write ends with a line if possible, so that
      // lines of other programs do not split a line.
      auto count = std::min<size_t>(text.size() - done, PIPE_BUF);
      const auto line_end = text.rfind('\n', done + count - 1);
      if (line_end != std::string::npos && line_end >= done) {
        count = line_end + 1 - done;
      }
      const ssize_t written = write(fd, text.data() + done, count);
      if (written >= 0) {
        done += written;
      } else if (errno == EAGAIN || errno == EINTR) {
        break;
      } else {
        error_ = errno;
        close(fd);
        fd = -1;
        done = text.size();
      }
    }
    text.erase(0, done);
  }
}

} // namespace fsdp::cli
