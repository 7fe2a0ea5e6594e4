#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <iostream>
#include <string>

#include <fsdp/error.h>
#include <fsdp/version.h>

#include "cli/command.h"

#define FSDP_TEXT(x) #x
#define FSDP_VALUE_TEXT(x) FSDP_TEXT(x)

namespace {

// Exit codes by kind of error; CLI11 uses 100 and up for words it cannot parse.
constexpr int kFailed = 1;
constexpr int kBadConfig = 2;
constexpr int kCommunication = 3;
constexpr int kCheckpoint = 4;

/// CLI11 would only say that a subcommand is required.
void check_command(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') {
    return;
  }
  std::string known;
  for (const auto* command : app.get_subcommands({})) {
    if (command->get_name() == argv[1]) {
      return;
    }
    known += (known.empty() ? "" : ", ") + command->get_name();
  }
  throw fsdp::ConfigError(
      {__func__, __FILE__, __LINE__},
      std::string("there is no command '") + argv[1] + "'; there are: " + known);
}

/// Takes the words behind the first `--`, which are no business of CLI11's, for
/// the program that `run` starts. Returns how many words are left to parse.
int cut_program(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || std::string(argv[1]) != "run") {
    return argc;
  }
  char** mark = std::find(argv, argv + argc, std::string("--"));
  auto* program = app.get_subcommand("run")->get_option("program");
  for (char** word = mark + 1; word < argv + argc; ++word) {
    program->add_result(*word);
  }
  return static_cast<int>(mark - argv);
}

int complain(const std::string& message, int exit_code) {
  std::cerr << "fsdp: " << message << std::endl;
  return exit_code;
}

} // namespace

int main(int argc, char** argv) {
  CLI::App app("Fully sharded data parallel training on LibTorch, without Python.", "fsdp");
  app.set_version_flag(
      "--version",
      "fsdp " FSDP_VALUE_TEXT(FSDP_VERSION_MAJOR) "." FSDP_VALUE_TEXT(
          FSDP_VERSION_MINOR) "." FSDP_VALUE_TEXT(FSDP_VERSION_PATCH) ", torch " TORCH_VERSION);
  app.require_subcommand(1);
  fsdp::cli::Action action;
  fsdp::cli::add_train(app, action);
  fsdp::cli::add_run(app, action);
  fsdp::cli::add_report(app, action);
  fsdp::cli::add_inspect(app, action);
  fsdp::cli::add_verify(app, action);
  fsdp::cli::add_convert(app, action);
  try {
    check_command(app, argc, argv);
    app.parse(cut_program(app, argc, argv), argv);
    return action();
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const fsdp::ConfigError& error) {
    return complain(error.what_without_backtrace(), kBadConfig);
  } catch (const fsdp::CommError& error) {
    return complain(error.what_without_backtrace(), kCommunication);
  } catch (const fsdp::CheckpointError& error) {
    return complain(error.what_without_backtrace(), kCheckpoint);
  } catch (const c10::Error& error) {
    return complain(error.what_without_backtrace(), kFailed);
  } catch (const std::exception& error) {
    return complain(error.what(), kFailed);
  }
}
