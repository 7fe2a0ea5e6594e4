#pragma once

#include <sys/types.h>

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "cli/run/output.h"

namespace fsdp::cli {

/// The process of one rank, in a process group of its own. This process reads its stdout and
/// stderr. The rank is killed if this process dies, and the destructor kills its whole group.
class Child {
 public:
  /// Starts a program with its arguments. A `bare` rank writes to this process's own stdout and
  /// stderr. Throws ValueError if there is no such program or it cannot be run.
  Child(
      int rank,
      Output& output,
      const std::vector<std::string>& words,
      const std::map<std::string, std::string>& environment,
      bool bare = false);
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  /// Kills the process group and passes on the rest of its output.
  ~Child();

  int rank() const {
    return rank_;
  }
  bool running() const {
    return running_;
  }
  /// The signal that killed the process, or 0. Valid once it has ended.
  int signal() const {
    return signal_;
  }
  /// The exit code, or 128 + the signal that killed the process. Valid once it has ended.
  int exit_code() const {
    return exit_code_;
  }
  /// Checks whether the process has ended. Returns true only in the first call after the end.
  bool reap();
  /// Sends `signal` to the process and the rest of its group.
  void signal_group(int signal) const;

  /// The file descriptor to poll for stdout (stream 0) or stderr (1). -1 if it is closed.
  int fd(int stream) const {
    return streams_[stream].fd;
  }
  /// Passes on one chunk of output, in whole lines that begin with "[rank n] ". A carriage return
  /// ends a line, too, so that progress bars are shown.
  void forward(int stream);
  /// Passes on all output that is there now, including a line that has not ended.
  void forward_rest(int stream);
  /// The last lines that the process wrote to stderr.
  const std::deque<std::string>& last_errors() const {
    return last_errors_;
  }

 private:
  struct Stream {
    int fd = -1;
    std::string partial;       // a line that has not ended yet
    bool after_return = false; // the last line ended with \r, so a \n belongs to it
  };
  Child(int rank, Output& output) : rank_(rank), output_(output) {}
  void write_line(int stream, const std::string& line);

  const int rank_;
  Output& output_;
  pid_t pid_ = -1; // stays valid: only the destructor waits for the process
  bool running_ = true;
  int signal_ = 0;
  int exit_code_ = 0;
  Stream streams_[2];
  std::deque<std::string> last_errors_;
};

} // namespace fsdp::cli
