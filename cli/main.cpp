#include <c10/util/Exception.h>
#include <signal.h>
#include <torch/version.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <limits>
#include <string>
#include <system_error>
#include <vector>

#include <fsdp/version.h>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/config/config_file.h"
#include "cli/nearest.h"

namespace {

/// Returns the command of a name. Throws ConfigError with the nearest name if there is none: CLI11
/// would only say that a subcommand is required.
CLI::App& find_command(CLI::App& app, const std::string& name) {
  std::vector<std::string> known;
  for (auto* command : app.get_subcommands({})) {
    if (command->get_name() == name) {
      return *command;
    }
    known.push_back(command->get_name());
  }
  fsdp::cli::throw_config_error(
      "there is no command '", name, "'", fsdp::cli::did_you_mean(name, known));
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

/// Refuses values that CLI11 changes without a word: it makes the nearest number of 64 bits of a
/// number that is too large, and true of "2".
void check_values(const CLI::App& command) {
  for (const auto* option : command.get_options()) {
    const bool is_switch = option->get_items_expected_max() == 0 || option->get_type_size() == 0 ||
                           option->get_type_name() == "BOOLEAN";
    if (!is_switch && option->get_type_name() != "INT") {
      continue;
    }
    for (const auto& text : option->results()) {
      char* end = nullptr;
      errno = 0;
      const auto number = std::strtoll(text.c_str(), &end, 0);
      const bool is_number = end == text.c_str() + text.size() && !text.empty();
      fsdp::cli::check_config(
          errno != ERANGE, option->get_name(), " ", text,
          ": it must be a number of 64 bits, between ", std::numeric_limits<int64_t>::min(),
          " and ", std::numeric_limits<int64_t>::max());
      fsdp::cli::check_config(
          !is_switch || !is_number || number == 0 || number == 1, option->get_name(), " ", text,
          ": it must be true or false");
    }
  }
}

/// Passes the words after the first `--` to `run`, which starts them as a program; CLI11 must not
/// parse them.
void cut_program(CLI::App& run, std::vector<std::string>& words) {
  const auto mark = std::find(words.begin(), words.end(), "--");
  for (auto word = mark; word != words.end(); ++word) {
    if (word != mark) {
      run.get_option("program")->add_result(*word);
    }
  }
  words.erase(mark, words.end());
}

/// Parses the words of the command line. The action of the command is set then. `origins` gets what
/// came from a config file.
void parse(CLI::App& app, std::vector<std::string> words, fsdp::cli::ConfigOrigins& origins) {
  CLI::App* command = nullptr;
  if (!words.empty() && !words[0].starts_with('-')) {
    const auto name = words[0];
    command = &find_command(app, name);
    words.erase(words.begin());
    if (name == "run") {
      cut_program(*command, words);
    } else {
      words = name == "train" ? fsdp::cli::expand_config(words, &origins) : words;
      check_options(*command, words);
    }
    words.insert(words.begin(), name);
  }
  std::reverse(words.begin(), words.end()); // as CLI11 expects them
  app.parse(words);
  if (command) {
    check_values(*command);
  }
}

/// The message for a terminal: values of users are quoted in it, so lines are cut and bytes that
/// could control the terminal become '?'.
std::string shown(const std::string& message) {
  constexpr size_t kLongestLine = 2000;
  std::string text;
  size_t length = 0;
  for (const char c : message) {
    length = c == '\n' ? 0 : length + 1;
    if (length <= kLongestLine) {
      text += std::iscntrl(static_cast<unsigned char>(c)) && c != '\n' && c != '\t' ? '?' : c;
    } else if (length == kLongestLine + 1) {
      text += "...";
    }
  }
  return text;
}

int complain(const std::string& message, int exit_code) {
  std::cerr << "fsdp: " << shown(message) << std::endl;
  return exit_code;
}

/// The advice for an error of the system inside an error of a rank, for example that a thread
/// cannot be started.
std::string advice_inside(const std::exception& error) {
  try {
    std::rethrow_if_nested(error);
  } catch (const std::system_error& inner) {
    return fsdp::cli::limit_advice(inner.code().value());
  } catch (...) { // another error needs no advice
  }
  return "";
}

} // namespace

// Outside of `try`, CLI11 throws only if two options have the same name.
// NOLINTNEXTLINE(bugprone-exception-escape)
int main(int argc, char** argv) {
  CLI::App app("Fully sharded data parallel training on LibTorch, without Python.", "fsdp");
  app.set_version_flag(
      "--version", c10::str(
                       "fsdp ", FSDP_VERSION_MAJOR, ".", FSDP_VERSION_MINOR, ".",
                       FSDP_VERSION_PATCH, ", torch ", TORCH_VERSION));
  app.require_subcommand(1);
  signal(SIGXFSZ, SIG_IGN); // a write beyond the limit on file sizes then fails with an error
  fsdp::cli::Action action;
  fsdp::cli::ConfigOrigins origins;
  app.failure_message([&](const CLI::App*, const CLI::Error& error) {
    return shown(origins.named(error.what())) + "\nRun with --help for more information.\n";
  });
  fsdp::cli::add_train(app, action);
  fsdp::cli::add_run(app, action);
  fsdp::cli::add_generate(app, action);
  fsdp::cli::add_report(app, action);
  fsdp::cli::add_inspect(app, action);
  fsdp::cli::add_verify(app, action);
  fsdp::cli::add_convert(app, action);
  fsdp::cli::add_eval(app, action);
  fsdp::cli::add_export(app, action);
  fsdp::cli::add_tokenize(app, action);
  fsdp::cli::add_doctor(app, action);
  fsdp::cli::add_fuzz(app, action);
  try {
    parse(app, {argv + 1, argv + argc}, origins);
    const int code = action();
    std::cout.flush();
    if (!std::cout && code == 0) {
      return complain("cannot write to standard output", fsdp::cli::kFailed);
    }
    return code;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : fsdp::cli::kBadConfig; // 0: --help, --version
  } catch (const fsdp::ConfigError& error) {
    return complain(origins.named(error.what_without_backtrace()), fsdp::cli::kBadConfig);
  } catch (const fsdp::CommError& error) {
    return complain(error.what_without_backtrace(), fsdp::cli::kCommunication);
  } catch (const fsdp::CheckpointError& error) {
    return complain(error.what_without_backtrace(), fsdp::cli::kCheckpoint);
  } catch (const c10::Error& error) {
    return complain(error.what_without_backtrace() + advice_inside(error), fsdp::cli::kFailed);
  } catch (const std::exception& error) {
    return complain(error.what(), fsdp::cli::kFailed);
  }
}
