#include "cli/run/child.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <c10/util/Exception.h>

#include "cli/check.h"
#include "cli/files.h"
#include "cli/invocation.h"

namespace fsdp::cli {

namespace {

constexpr size_t kKeptLines = 12;
constexpr size_t kLongestLine = 64 << 10;
constexpr int kChunk = 16 << 10;

/// The path that a shell would run. Throws ValueError if there is none.
std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    TORCH_CHECK_VALUE(
        access(name.c_str(), X_OK) == 0, "cannot run ", name, ": ", std::strerror(errno));
    TORCH_CHECK_VALUE(is_file(name), "cannot run ", name, ": it is not a file");
    return name;
  }
  const auto found = find_in_path(name);
  TORCH_CHECK_VALUE(!found.empty(), "there is no program '", name, "' on the PATH");
  return found;
}

std::vector<std::string> merged(const std::map<std::string, std::string>& extra) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    if (!extra.contains(text.substr(0, text.find('=')))) {
      result.push_back(text);
    }
  }
  for (const auto& [name, value] : extra) {
    result.push_back(name + "=" + value);
  }
  return result;
}

} // namespace

Child::Child(
    int rank,
    Output& output,
    const std::vector<std::string>& words,
    const std::map<std::string, std::string>& environment,
    bool bare)
    : Child(rank, output) { // from here on, a throw runs the destructor
  const auto program = find_program(words.at(0));
  const auto variables = merged(environment);
  const auto arguments = exec_words(words);
  const auto environment_pointers = exec_words(variables);
  int pipes[3][2]; // stdout, stderr, and errno if exec fails
  for (auto& ends : pipes) {
    TORCH_CHECK(
        pipe2(ends, O_CLOEXEC) == 0, "cannot make a pipe: ", std::strerror(errno),
        limit_advice(errno));
  }
  const pid_t parent = getpid();
  pid_ = fork();
  TORCH_CHECK(
      pid_ >= 0, "cannot start rank ", rank, ": ", std::strerror(errno), limit_advice(errno));
  if (pid_ == 0) {
    // Only calls that are safe between fork and exec in a threaded process.
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
      _exit(127); // the parent has already died
    }
    const int null = open("/dev/null", O_RDONLY);
    dup2(null, 0);
    if (!bare) {
      dup2(pipes[0][1], 1);
      dup2(pipes[1][1], 2);
    }
    ::signal(SIGPIPE, SIG_DFL); // the parent ignores it because of its store
    // A shell lets its background jobs ignore SIGINT. A rank must obey what the launcher passes on,
    // also before it has handlers of its own.
    ::signal(SIGINT, SIG_DFL);
    ::signal(SIGTERM, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    execve(program.c_str(), arguments.data(), environment_pointers.data());
    const int error = errno;
    (void)!write(pipes[2][1], &error, sizeof(error));
    _exit(127);
  }
  setpgid(pid_, pid_); // also in the parent, so that `signal_group` works at once
  for (const auto& ends : pipes) {
    close(ends[1]);
  }
  for (int stream = 0; stream < 2; ++stream) {
    streams_[stream].fd = pipes[stream][0];
    fcntl(streams_[stream].fd, F_SETFL, O_NONBLOCK);
  }
  int error = 0; // stays 0 if exec succeeds, which closes the pipe
  (void)!read(pipes[2][0], &error, sizeof(error));
  close(pipes[2][0]);
  TORCH_CHECK_VALUE(
      error == 0, "cannot run ", program, ": ", std::strerror(error),
      error == ENOEXEC ? "; a script needs a first line with #!" : "");
}

Child::~Child() {
  if (pid_ > 0) {
    signal_group(SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  for (int stream = 0; stream < 2; ++stream) {
    forward_rest(stream);
    close(streams_[stream].fd);
  }
}

bool Child::reap() {
  siginfo_t info{};
  // WNOWAIT: the dead process keeps its id, so that `signal_group` cannot reach another process.
  if (!running_ || waitid(P_PID, pid_, &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid != pid_) {
    return false;
  }
  running_ = false;
  signal_ = info.si_code == CLD_EXITED ? 0 : info.si_status;
  exit_code_ = signal_ ? 128 + signal_ : info.si_status;
  return true;
}

void Child::signal_group(int signal) const {
  kill(-pid_, signal);
}

void Child::forward(int stream) {
  auto& [fd, partial, after_return] = streams_[stream];
  char buffer[kChunk];
  const ssize_t count = read(fd, buffer, sizeof(buffer));
  if (count == 0) {
    close(fd);
    fd = -1;
  }
  if (count <= 0) {
    return;
  }
  size_t start = 0;
  size_t end = partial.size(); // no line ends before this position
  partial.append(buffer, count);
  for (; (end = partial.find_first_of("\r\n", end)) != std::string::npos; start = ++end) {
    const bool is_return = partial[end] == '\r';
    const bool is_empty = start == end;
    // "\r\n" ends one line, and a return in an empty line prints nothing.
    const bool says_nothing = is_empty && (is_return || after_return);
    if (!says_nothing) {
      write_line(stream, partial.substr(start, end - start));
    }
    after_return = is_return && !is_empty;
  }
  partial.erase(0, start);
  if (partial.size() >= kLongestLine) {
    write_line(stream, partial);
    partial.clear();
  }
}

void Child::forward_rest(int stream) {
  auto& [fd, partial, after_return] = streams_[stream];
  // Does not wait for the end of the stream: a process that the rank left behind may write forever.
  int left = 0;
  for (ioctl(fd, FIONREAD, &left); left > 0; left -= kChunk) {
    forward(stream);
  }
  if (!partial.empty()) {
    write_line(stream, partial);
    partial.clear();
  }
}

void Child::write_line(int stream, const std::string& line) {
  if (stream == 1) {
    last_errors_.push_back(line);
    if (last_errors_.size() > kKeptLines) {
      last_errors_.pop_front();
    }
  }
  output_.add(stream, "[rank " + std::to_string(rank_) + "] " + line + "\n");
}

} // namespace fsdp::cli
