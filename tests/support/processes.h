#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace fsdp::test {

/// How a program ended, and what it wrote.
struct Ended {
  int exit_code = 0; // 128 + signal if a signal ended it
  bool timed_out = false;
  std::string output; // of both streams
};

using Environment = std::map<std::string, std::string>;

struct Command {
  std::vector<std::string> words;
  Environment environment; // added to that of this process
};

/// Starts all commands at once and waits for them. Kills those that run longer than `limit`.
std::vector<Ended> run_commands(
    const std::vector<Command>& commands, std::chrono::seconds limit = std::chrono::seconds(100));

/// The path of the running test binary.
std::string this_program();

/// A port of the loopback interface that is free now.
int free_port();

/// The bytes of a file. They are empty if there is no such file.
std::string file_text(const std::string& path);

/// Makes an empty folder. It is removed when the process exits.
std::string temporary_folder();

/// Runs the current test again in `n` processes and returns how they ended. In them, this call runs
/// `body` and returns nothing. RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the variables of
/// `change(rank)` are set there.
std::vector<Ended> spawn_ranks(
    int n,
    const std::function<void()>& body,
    const std::function<Environment(int rank)>& change = {});

/// Calls spawn_ranks and expects that every process passes.
void expect_ranks_pass(
    int n,
    const std::function<void()>& body,
    const std::function<Environment(int rank)>& change = {});

} // namespace fsdp::test
