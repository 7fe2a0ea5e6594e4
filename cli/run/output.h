#pragma once

#include <string>

namespace fsdp::cli {

/// Our own stdout (stream 0) and stderr (1). Whoever reads them may be slow or
/// gone, and we still have ranks to watch: text waits here, and no write blocks.
class Output {
 public:
  Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  ~Output();

  void add(int stream, const std::string& text);
  /// Writes what goes out without waiting.
  void flush();
  /// File descriptor to poll for writing, -1 when nothing waits.
  int fd(int stream) const {
    return streams_[stream].text.empty() ? -1 : streams_[stream].fd;
  }
  bool waiting() const {
    return fd(0) >= 0 || fd(1) >= 0;
  }
  /// So much waits that what fills the stream should rather wait itself.
  bool full(int stream) const;
  /// Why a write failed, 0 if none did. The rest of that stream is dropped.
  int error() const {
    return error_;
  }

 private:
  struct Stream {
    int fd = -1;
    std::string text;
  };
  Stream streams_[2];
  int error_ = 0;
};

} // namespace fsdp::cli
