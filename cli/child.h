#pragma once

#include <sys/types.h>

#include <deque>
#include <map>
#include <string>
#include <vector>

namespace fsdp::cli {

/// One rank's process, in a process group of its own, with both its outputs
/// read by us. It dies with us, and leaves no process behind when it ends.
class Child {
 public:
  /// Starts `words`; throws ValueError when there is no such program.
  Child(
      int rank,
      const std::vector<std::string>& words,
      const std::map<std::string, std::string>& environment);
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  /// Kills what is left.
  ~Child();

  int rank() const {
    return rank_;
  }
  pid_t pid() const {
    return pid_;
  }
  bool running() const {
    return running_;
  }
  /// Exit code of the ended process; 128 + signal when one killed it.
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
  /// Copies what is there to our own stdout or stderr, whole lines, each
  /// behind the rank's mark.
  void forward(int stream);
  /// The end of what it wrote to stderr.
  const std::deque<std::string>& last_errors() const {
    return last_errors_;
  }

 private:
  struct Stream {
    int fd = -1;
    std::string partial; // a line that has not ended yet
  };
  void write_line(int stream, const std::string& line);

  const int rank_;
  pid_t pid_ = -1;
  bool running_ = true;
  int exit_code_ = 0;
  Stream streams_[2];
  std::deque<std::string> last_errors_;
};

} // namespace fsdp::cli
