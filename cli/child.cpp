#include "cli/child.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <c10/util/Exception.h>

extern char** environ;

namespace fsdp::cli {

namespace {

constexpr size_t kKeptLines = 12;

/// The path that a shell would run.
std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    TORCH_CHECK_VALUE(
        access(name.c_str(), X_OK) == 0, "cannot run ", name, ": ", std::strerror(errno));
    return name;
  }
  const char* path = std::getenv("PATH");
  std::string folders = path ? path : "/usr/bin:/bin";
  for (size_t start = 0; start <= folders.size();) {
    const auto end = std::min(folders.find(':', start), folders.size());
    const auto candidate = folders.substr(start, end - start) + "/" + name;
    if (access(candidate.c_str(), X_OK) == 0) {
      return candidate;
    }
    start = end + 1;
  }
  TORCH_CHECK_VALUE(false, "there is no program '", name, "' on the PATH");
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const auto& text : texts) {
    result.push_back(const_cast<char*>(text.c_str()));
  }
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> merged(const std::map<std::string, std::string>& extra) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    if (!extra.count(text.substr(0, text.find('=')))) {
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
    const std::vector<std::string>& words,
    const std::map<std::string, std::string>& environment)
    : rank_(rank) {
  const auto program = find_program(words.at(0));
  const auto variables = merged(environment);
  const auto arguments = pointers(words);
  const auto environment_pointers = pointers(variables);
  int out[2];
  int err[2];
  TORCH_CHECK(
      pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0, "no pipe: ", std::strerror(errno));
  const pid_t parent = getpid();
  pid_ = fork();
  TORCH_CHECK(pid_ >= 0, "cannot start rank ", rank, ": ", std::strerror(errno));
  if (pid_ == 0) {
    // Only calls that are safe between fork and exec in a threaded process.
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
      _exit(127); // we are gone already
    }
    const int null = open("/dev/null", O_RDONLY);
    dup2(null, 0);
    dup2(out[1], 1);
    dup2(err[1], 2);
    signal(SIGPIPE, SIG_DFL); // which our store made us ignore
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    execve(program.c_str(), arguments.data(), environment_pointers.data());
    _exit(127);
  }
  setpgid(pid_, pid_); // here too, so that `send` cannot come too early
  close(out[1]);
  close(err[1]);
  streams_[0].fd = out[0];
  streams_[1].fd = err[0];
  for (const auto& stream : streams_) {
    fcntl(stream.fd, F_SETFL, O_NONBLOCK);
  }
}

Child::~Child() {
  send(SIGKILL);
  if (running_) {
    waitpid(pid_, nullptr, 0);
  }
  for (int stream = 0; stream < 2; ++stream) {
    forward(stream);
    if (!streams_[stream].partial.empty()) {
      write_line(stream, streams_[stream].partial);
    }
    if (streams_[stream].fd >= 0) {
      close(streams_[stream].fd);
    }
  }
}

bool Child::reap() {
  int status = 0;
  if (!running_ || waitpid(pid_, &status, WNOHANG) != pid_) {
    return false;
  }
  running_ = false;
  exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return true;
}

void Child::send(int signal) const {
  kill(-pid_, signal);
}

void Child::forward(int stream) {
  auto& [fd, partial] = streams_[stream];
  char buffer[1 << 14];
  while (fd >= 0) {
    const ssize_t count = read(fd, buffer, sizeof(buffer));
    if (count < 0) {
      return; // nothing there now
    }
    if (count == 0) {
      close(fd);
      fd = -1;
      return;
    }
    partial.append(buffer, count);
    for (size_t end; (end = partial.find('\n')) != std::string::npos;) {
      write_line(stream, partial.substr(0, end));
      partial.erase(0, end + 1);
    }
  }
}

void Child::write_line(int stream, const std::string& line) {
  if (stream == 1) {
    last_errors_.push_back(line);
    if (last_errors_.size() > kKeptLines) {
      last_errors_.pop_front();
    }
  }
  // One write per line: lines of other programs do not come in between.
  const auto text = "[rank " + std::to_string(rank_) + "] " + line + "\n";
  (void)!write(stream + 1, text.data(), text.size());
}

} // namespace fsdp::cli
