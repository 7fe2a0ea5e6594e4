#pragma once

#include <sys/types.h>

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "cli/run/output.h"

namespace fsdp::cli {

/// One rank's process, in a process group of its own, with both its outputs
/// read by us. It dies with us, and leaves no process behind when it ends.
class Child {
 public:
  /// Starts `words`; throws ValueError when there is no such program, or it
  /// cannot be run. A bare one writes to our own outputs itself.
  Child(
      int rank,
      Output& output,
      const std::vector<std::string>& words,
      const std::map<std::string, std::string>& environment,
      bool bare = false);
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  /// Kills what is left, and passes on what it wrote.
  ~Child();

  int rank() const {
    return rank_;
  }
  bool running() const {
    return running_;
  }
  /// Of the ended process: the signal that killed it, or 0.
  int signal() const {
    return signal_;
  }
  /// Of the ended process; 128 + signal when one killed it.
  int exit_code() const {
    return exit_code_;
  }
  /// Looks whether it has ended; true when it did so just now.
  bool reap();
  /// Sends `signal` to the process and to all that it started.
  void send(int signal) const;

  /// File descriptors to poll, -1 when closed: stdout, stderr.
  int fd(int stream) const {
    return streams_[stream].fd;
  }
  /// Passes on one chunk of what it wrote, in whole lines, each behind the
  /// rank's mark. A carriage return ends a line too: progress bars go on.
  void forward(int stream);
  /// Passes on all that is there now, and a line that has not ended.
  void forward_rest(int stream);
  /// The end of what it wrote to stderr.
  const std::deque<std::string>& last_errors() const {
    return last_errors_;
  }

 private:
  struct Stream {
    int fd = -1;
    std::string partial;       // a line that has not ended yet
    bool after_return = false; // a newline would belong to the last line's end
  };
  Child(int rank, Output& output) : rank_(rank), output_(output) {}
  void write_line(int stream, const std::string& line);

  const int rank_;
  Output& output_;
  pid_t pid_ = -1; // ours until the destructor: not before is the process waited for
  bool running_ = true;
  int signal_ = 0;
  int exit_code_ = 0;
  Stream streams_[2];
  std::deque<std::string> last_errors_;
};

} // namespace fsdp::cli
