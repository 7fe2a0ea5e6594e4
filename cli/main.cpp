#include <c10/util/Exception.h>
#include <signal.h>
#include <torch/version.h>

#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include <fsdp/error.h>
#include <fsdp/version.h>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/config/config_file.h"
#include "cli/nearest.h"

#define FSDP_TEXT(x) #x
#define FSDP_VALUE_TEXT(x) FSDP_TEXT(x)

namespace {

/// Throws ConfigError with the nearest name if there is no such command. CLI11 would only say that
/// a subcommand is required.
void check_command(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') {
    return;
  }
  std::vector<std::string> known;
  for (const auto* command : app.get_subcommands({})) {
    if (command->get_name() == argv[1]) {
      return;
    }
    known.push_back(command->get_name());
  }
  throw fsdp::ConfigError(
      {__func__, __FILE__, __LINE__}, std::string("there is no command '") + argv[1] + "'" +
                                          fsdp::cli::did_you_mean(argv[1], known));
}

/// Throws ExtrasError with the nearest name if there is no such option. CLI11 would only say that
/// it did not expect the word.
void check_options(const CLI::App& command, const std::vector<std::string>& words) {
  std::vector<std::string> known;
  for (const auto* option : command.get_options()) {
    for (const auto& name : option->get_lnames()) {
      known.push_back("--" + name);
    }
  }
  for (const auto& word : words) {
    const auto name = word.substr(0, word.find('='));
    if (name.size() > 2 && name.starts_with("--") &&
        std::find(known.begin(), known.end(), name) == known.end()) {
      const auto near = fsdp::cli::nearest(name, known);
      throw CLI::ExtrasError(
          command.get_name() + ": there is no option " + name +
              (near.empty() ? std::string() : "; did you mean " + near + "?"),
          CLI::ExitCodes::ExtrasError);
    }
  }
}

/// The arguments of `train`, with --config replaced by the options in the file. The last one comes
/// first, as CLI11 expects it. Empty for other commands.
std::vector<std::string> words_of_train(int argc, char** argv) {
  if (argc < 2 || std::string(argv[1]) != "train") {
    return {};
  }
  auto words = fsdp::cli::expand_config({argv + 2, argv + argc});
  words.insert(words.begin(), "train");
  std::reverse(words.begin(), words.end());
  return words;
}

/// Passes the words after the first `--` to `run`, which starts them as a program; CLI11 must not
/// parse them. Returns how many words are left to parse.
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
  signal(SIGXFSZ, SIG_IGN); // a write beyond the limit on file sizes then fails with an error
  fsdp::cli::Action action;
  fsdp::cli::add_train(app, action);
  fsdp::cli::add_run(app, action);
  fsdp::cli::add_generate(app, action);
  fsdp::cli::add_report(app, action);
  fsdp::cli::add_inspect(app, action);
  fsdp::cli::add_verify(app, action);
  fsdp::cli::add_convert(app, action);
  fsdp::cli::add_doctor(app, action);
  try {
    check_command(app, argc, argv);
    auto words = words_of_train(argc, argv);
    if (!words.empty()) {
      check_options(*app.get_subcommand("train"), words);
      app.parse(words);
    } else {
      argc = cut_program(app, argc, argv);
      if (argc >= 2 && argv[1][0] != '-' && std::string(argv[1]) != "run") {
        check_options(*app.get_subcommand(argv[1]), {argv + 2, argv + argc});
      }
      app.parse(argc, argv);
    }
    const int code = action();
    std::cout.flush();
    if (!std::cout && code == 0) {
      return complain("cannot write to standard output", fsdp::cli::kFailed);
    }
    return code;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : fsdp::cli::kBadConfig; // 0: --help, --version
  } catch (const fsdp::ConfigError& error) {
    return complain(error.what_without_backtrace(), fsdp::cli::kBadConfig);
  } catch (const fsdp::CommError& error) {
    return complain(error.what_without_backtrace(), fsdp::cli::kCommunication);
  } catch (const fsdp::CheckpointError& error) {
    return complain(error.what_without_backtrace(), fsdp::cli::kCheckpoint);
  } catch (const c10::Error& error) {
    return complain(error.what_without_backtrace(), fsdp::cli::kFailed);
  } catch (const std::exception& error) {
    return complain(error.what(), fsdp::cli::kFailed);
  }
}
