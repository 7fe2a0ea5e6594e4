#include "support/processes.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace fsdp::test {

namespace {

constexpr const char* kWorkerVariable = "FSDP_TEST_WORKER";

struct Running {
  pid_t pid = -1;
  std::string log;
};

std::vector<std::string> merged_environment(const Environment& extra) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    if (!extra.count(text.substr(0, text.find('=')))) {
      result.push_back(text);
    }
  }
  for (const auto& [name, value] : extra) {
    if (!value.empty()) { // an empty value removes the variable
      result.push_back(name + "=" + value);
    }
  }
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (auto& text : texts) {
    result.push_back(text.data());
  }
  result.push_back(nullptr);
  return result;
}

Running start(const Command& command, const std::string& log) {
  auto words = command.words;
  auto environment = merged_environment(command.environment);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  Running running{.log = log};
  const int error = posix_spawnp(
      &running.pid, words[0].c_str(), &actions, nullptr, pointers(words).data(),
      pointers(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    throw std::runtime_error("cannot start " + command.words[0]);
  }
  return running;
}

Ended wait_for(const Running& running, std::chrono::steady_clock::time_point deadline) {
  Ended ended;
  int status = 0;
  while (waitpid(running.pid, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline && !ended.timed_out) {
      ended.timed_out = true;
      kill(running.pid, SIGKILL);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ended.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  ended.output = file_text(running.log);
  return ended;
}

std::string this_test() {
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  return std::string(info->test_suite_name()) + "." + info->name();
}

} // namespace

std::vector<Ended> run_commands(const std::vector<Command>& commands, std::chrono::seconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  const auto folder = temporary_folder();
  std::vector<Running> running;
  for (size_t i = 0; i < commands.size(); ++i) {
    running.push_back(start(commands[i], folder + "/" + std::to_string(i)));
  }
  std::vector<Ended> ended;
  for (const auto& process : running) {
    ended.push_back(wait_for(process, deadline));
  }
  return ended;
}

std::string this_program() {
  return std::filesystem::read_symlink("/proc/self/exe").string();
}

std::string file_text(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  bind(fd, reinterpret_cast<sockaddr*>(&address), length);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  close(fd);
  return ntohs(address.sin_port);
}

std::string temporary_folder() {
  struct Folders {
    std::vector<std::string> made;
    ~Folders() {
      for (const auto& path : made) {
        // std::filesystem::remove_all crashes with some torch builds, which export a copy of it.
        (void)!std::system(("rm -rf " + path).c_str());
      }
    }
  };
  static Folders folders;
  std::string path = (std::filesystem::temp_directory_path() / "fsdp_test_XXXXXX").string();
  if (!mkdtemp(path.data())) {
    throw std::runtime_error("cannot make a temporary folder");
  }
  folders.made.push_back(path);
  return path;
}

std::vector<Ended> spawn_ranks(
    int n, const std::function<void()>& body, const std::function<Environment(int rank)>& change) {
  if (std::getenv(kWorkerVariable)) {
    body();
    return {};
  }
  const auto port = std::to_string(free_port());
  std::vector<Command> commands;
  for (int rank = 0; rank < n; ++rank) {
    Environment environment{{kWorkerVariable, "1"},
                            {"RANK", std::to_string(rank)},
                            {"WORLD_SIZE", std::to_string(n)},
                            {"MASTER_ADDR", "127.0.0.1"},
                            {"MASTER_PORT", port},
                            {"OMP_NUM_THREADS", "1"}};
    if (change) {
      for (const auto& [name, value] : change(rank)) {
        environment[name] = value;
      }
    }
    commands.push_back({{this_program(), "--gtest_filter=" + this_test()}, environment});
  }
  return run_commands(commands);
}

void expect_ranks_pass(
    int n, const std::function<void()>& body, const std::function<Environment(int rank)>& change) {
  const auto ended = spawn_ranks(n, body, change);
  for (size_t rank = 0; rank < ended.size(); ++rank) {
    EXPECT_FALSE(ended[rank].timed_out) << "rank " << rank << " hung";
    EXPECT_EQ(ended[rank].exit_code, 0) << "rank " << rank << ":\n" << ended[rank].output;
  }
}

} // namespace fsdp::test
