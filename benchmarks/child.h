#pragma once

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace bench {

/// Returns a free port of the loopback address, for processes that connect to each other.
inline int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  TORCH_CHECK(
      fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
          getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0,
      "no free port");
  close(fd);
  return ntohs(address.sin_port);
}

/// A child process with pipes to its standard input and output. A child that takes
/// commands reads one a line, answers it with a line, and sleeps until the next.
class Child {
 public:
  /// The child writes its standard error to `stderr_fd`.
  explicit Child(std::vector<std::string> words, int stderr_fd = STDERR_FILENO) {
    int to_child[2];
    int from_child[2];
    // Other children must not inherit these pipes: they would keep this child's input open.
    TORCH_CHECK(pipe2(to_child, O_CLOEXEC) == 0 && pipe2(from_child, O_CLOEXEC) == 0, "no pipe");
    std::vector<char*> argv;
    for (auto& word : words) {
      argv.push_back(word.data());
    }
    argv.push_back(nullptr);
    signal(SIGPIPE, SIG_IGN);
    pid_ = fork();
    TORCH_CHECK(pid_ >= 0, "no process");
    if (pid_ == 0) {
      dup2(to_child[0], 0);
      dup2(from_child[1], 1);
      dup2(stderr_fd, 2);
      execvp(argv[0], argv.data());
      fprintf(stderr, "%s: %s\n", argv[0], strerror(errno));
      _exit(127);
    }
    close(to_child[0]);
    close(from_child[1]);
    commands_ = fdopen(to_child[1], "w");
    answers_ = fdopen(from_child[0], "r");
  }

  ~Child() {
    close_input();
    waitpid(pid_, nullptr, 0);
    fclose(answers_);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// Closes the child's input, so that the child ends. Called for all children before
  /// the first destructor waits, it lets them end together.
  void close_input() {
    if (commands_) {
      fclose(std::exchange(commands_, nullptr));
    }
  }

  void send_signal(int number) const {
    kill(pid_, number);
  }

  std::string ask(const std::string& command) {
    tell(command);
    return answer();
  }
  /// The two halves of `ask`, for several children at once.
  void tell(const std::string& command) {
    command_ = command;
    fprintf(commands_, "%s\n", command.c_str());
    fflush(commands_);
  }
  std::string answer() {
    const auto line = read_line();
    TORCH_CHECK(line, "a child process ended on '", command_, "'");
    return *line;
  }

  std::optional<std::string> read_line() {
    std::string line;
    for (int c = fgetc(answers_); c != EOF; c = fgetc(answers_)) {
      if (c == '\n') {
        return line;
      }
      line.push_back(static_cast<char>(c));
    }
    return std::nullopt;
  }

 private:
  pid_t pid_ = -1;
  std::string command_; // the last one that was sent
  FILE* commands_ = nullptr;
  FILE* answers_ = nullptr;
};

} // namespace bench
