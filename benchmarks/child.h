#pragma once

#include <c10/util/Exception.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

namespace bench {

/// A program of ours in another language, which works only while it is asked:
/// one line for each line.
class Child {
 public:
  explicit Child(std::vector<std::string> words) {
    int to_child[2];
    int from_child[2];
    TORCH_CHECK(pipe(to_child) == 0 && pipe(from_child) == 0, "no pipe");
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
      for (const int fd : {to_child[0], to_child[1], from_child[0], from_child[1]}) {
        close(fd);
      }
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
    fclose(commands_);
    waitpid(pid_, nullptr, 0);
    fclose(answers_);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  std::string ask(const std::string& command) {
    fprintf(commands_, "%s\n", command.c_str());
    fflush(commands_);
    const auto answer = read_line();
    TORCH_CHECK(answer, "the Python side ended on '", command, "'");
    return *answer;
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
  FILE* commands_ = nullptr;
  FILE* answers_ = nullptr;
};

} // namespace bench
