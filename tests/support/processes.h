#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace fsdp::test {

/// How a program ended, and what it wrote.
struct Ended {
  int exit_code = 0; // 128 + signal when killed
  bool timed_out = false;
  std::string output; // both streams together
};

using Environment = std::map<std::string, std::string>;

/// Starts every command at once, each with its variables on top of ours, and
/// waits for all. Those still running after `limit` are killed.
struct Command {
  std::vector<std::string> words;
  Environment environment;
};
std::vector<Ended> run_commands(
    const std::vector<Command>& commands, std::chrono::seconds limit = std::chrono::seconds(100));

/// The path of the running test binary.
std::string this_program();

/// A loopback port that was free a moment ago.
int free_port();

/// The bytes of a file; none if there is no such file.
std::string file_text(const std::string& path);

/// A new empty folder, removed at exit.
std::string temporary_folder();

/// Runs this very test again in `n` processes with RANK, WORLD_SIZE,
/// MASTER_ADDR and MASTER_PORT set (and `change(rank)` on top), where the same
/// call runs `body` instead. Returns how they ended; none in the processes.
std::vector<Ended> spawn_ranks(
    int n,
    const std::function<void()>& body,
    const std::function<Environment(int rank)>& change = {});

/// The same, and expects every one to pass.
void expect_ranks_pass(
    int n,
    const std::function<void()>& body,
    const std::function<Environment(int rank)>& change = {});

} // namespace fsdp::test
