#pragma once

#include <string>

namespace fsdp::cli {

/// A buffer in front of this process's stdout (stream 0) and stderr (1). A write never blocks,
/// because the ranks must be watched even if nobody reads the output.
class Output {
 public:
  Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  ~Output();

  void add(int stream, const std::string& text);
  /// Writes as much as possible without blocking.
  void flush();
  /// The file descriptor to poll for writing. -1 if no text waits.
  int fd(int stream) const {
    return streams_[stream].text.empty() ? -1 : streams_[stream].fd;
  }
  bool waiting() const {
    return fd(0) >= 0 || fd(1) >= 0;
  }
  /// Returns true if so much text waits that no more should be added.
  bool full(int stream) const;
  /// The errno of a write that failed, or 0. The rest of that stream is dropped.
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
