// `fsdp fuzz engine`: trains random models, sharded in random ways, next to unsharded ones.
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <iostream>
#include <string>
#include <thread>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/fuzz/program.h"
#include "cli/fuzz/python.h"
#include "cli/fuzz/run.h"
#include "cli/fuzz/shrink.h"
#include "cli/invocation.h"
#include "cli/train/progress.h"

namespace fsdp::cli {

namespace fuzz {
namespace {

constexpr int kWatchdogSeconds = 300; // a case takes a fraction of a second

struct Options {
  double seconds = 30;
  uint64_t seed = 0;
  std::optional<uint64_t> only_case = {};
  int max_failures = 5;
  bool python = true;
  double tamper = 1;
};

std::atomic<uint64_t> current_case = 0;
std::atomic<uint64_t> num_runs = 0; // of cases, also smaller ones

/// Prints the command that repeats the case, before the process ends. A signal handler may call it.
void end_with_case(const char* what) {
  char text[160];
  char digits[24];
  int at = sizeof(digits) - 1;
  digits[at] = '\0';
  auto number = current_case.load();
  do {
    digits[--at] = static_cast<char>('0' + number % 10);
    number /= 10;
  } while (number > 0);
  std::strcpy(text, "\nfsdp: ");
  std::strcat(text, what);
  std::strcat(text, "; to repeat it: fsdp fuzz engine --case ");
  std::strcat(text, digits + at);
  std::strcat(text, "\n");
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text, std::strlen(text));
}

void on_crash(int signal_number) {
  signal(signal_number, SIG_DFL);
  end_with_case("a case crashed");
  raise(signal_number);
}

/// Ends the process if a case hangs. Counts its own waits: a clock would go on while the machine
/// sleeps.
class Watchdog {
 public:
  Watchdog() {
    thread_ = std::jthread([](const std::stop_token& stop) {
      uint64_t seen = num_runs;
      for (int waits = 0; !stop.stop_requested(); ++waits) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        if (seen != num_runs) {
          seen = num_runs;
          waits = 0;
        }
        if (waits > 10 * kWatchdogSeconds) {
          end_with_case("a case hangs");
          _exit(kFailed);
        }
      }
    });
  }

 private:
  std::jthread thread_;
};

class Fuzzer {
 public:
  explicit Fuzzer(const Options& options) : options_(options) {}

  int run() {
    torch::set_num_threads(1);
    for (const int each : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE}) {
      signal(each, on_crash);
    }
    run_cases();
    compare_with_python();
    return sum_up();
  }

 private:
  void run_cases() {
    const Watchdog watchdog;
    if (options_.only_case) {
      run_one(*options_.only_case);
    } else {
      const auto share = options_.python ? 0.75 : 1; // of the time; the rest is Python's
      uint64_t next = options_.seed * 1'000'000;
      while (seconds() < options_.seconds * share && num_failures_ < options_.max_failures) {
        run_one(next++);
        show();
      }
    }
  }

  void run_one(uint64_t seed) {
    current_case = seed;
    ++num_runs;
    auto c = draw_case(seed);
    c.tamper = options_.tamper;
    const auto outcome = run_case(c);
    ++num_cases_;
    num_steps_ += static_cast<int64_t>(c.steps.size());
    num_comparisons_ += outcome.num_comparisons;
    if (outcome.failure) {
      report(c, *outcome.failure);
    } else if (options_.python && fits_python(c)) {
      for_python_.push_back({c, outcome.parameters});
    }
  }

  void report(const Case& c, const Failure& failure) {
    ++num_failures_;
    screen_.line("");
    screen_.labelled("failed", c10::str("case ", c.seed, ": ", failure.message));
    screen_.line("Making it smaller");
    Failure last = failure;
    const auto small = shrink(c, [&](const Case& smaller) {
      ++num_runs;
      const auto outcome = run_case(smaller);
      const bool same = outcome.failure && outcome.failure->kind == failure.kind;
      last = same ? *outcome.failure : last;
      return same;
    });
    screen_.line(program(small, last.message));
    screen_.line(c10::str("To repeat it: ", invocation(), " fuzz engine --case ", c.seed));
  }

  void compare_with_python() {
    if (!options_.python) {
      return;
    }
    const auto result = run_python(for_python_, options_.only_case ? 60 : options_.seconds / 4);
    num_python_ = result.num_cases;
    python_missing_ = result.missing;
    for (const auto& [c, failure] : result.failures) {
      ++num_failures_;
      screen_.labelled("failed", c10::str("case ", c.seed, ": ", failure.message));
      screen_.line(program(c, failure.message));
    }
  }

  std::string counts() const {
    return c10::str(
        plural(num_cases_, "case"), ", ", plural(num_steps_, "step"), ", ",
        plural(num_comparisons_, "comparison"), ", ", plural(num_failures_, "failure"));
  }

  void show() {
    const auto text = c10::str("fuzz  ", static_cast<int>(seconds()), " s  ", counts());
    if (screen_.is_terminal()) {
      screen_.replace(text);
    } else if (seconds() >= next_line_) {
      screen_.line(text);
      next_line_ += std::max(10.0, next_line_ / 2);
    }
  }

  int sum_up() {
    screen_.line("");
    screen_.labelled("cases", c10::str(num_cases_));
    screen_.labelled("steps", c10::str(num_steps_));
    screen_.labelled("compared", c10::str(num_comparisons_, " tensors with the unsharded model"));
    screen_.labelled(
        "python", !python_missing_.empty() ? "not compared: " + python_missing_
                  : options_.python ? c10::str(num_python_, " cases compared with Python's FSDP2")
                                    : "not asked for");
    screen_.labelled("failures", c10::str(num_failures_));
    return num_failures_ == 0 ? 0 : kFailed;
  }

  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

  const Options options_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  Screen screen_;
  double next_line_ = 10;
  int64_t num_cases_ = 0;
  int64_t num_steps_ = 0;
  int64_t num_comparisons_ = 0;
  int64_t num_failures_ = 0;
  int64_t num_python_ = 0;
  std::string python_missing_;
  std::vector<ForPython> for_python_;
};

} // namespace
} // namespace fuzz

void add_fuzz(CLI::App& app, Action& action) {
  struct Words {
    fuzz::Options options;
    std::string what;
  };
  auto* command = app.add_subcommand("fuzz", "Test the library with random cases");
  const auto words = std::make_shared<Words>();
  auto& options = words->options;
  command->add_option("what", words->what, "engine: sharded training next to unsharded training")
      ->check(CLI::IsMember({"engine"}))
      ->required();
  command->add_option("--seconds", options.seconds, "How long to go on")->capture_default_str();
  command->add_option("--seed", options.seed, "Where to begin; another seed gives other cases")
      ->capture_default_str();
  command->add_option("--case", options.only_case, "Run this case only, and make it smaller");
  command
      ->add_option("--max-failures", options.max_failures, "Number of failures after which it ends")
      ->capture_default_str();
  command->add_flag("!--no-python", options.python, "Do not compare with Python's FSDP2");
  command->add_option(
      "--tamper", options.tamper, "Multiply a gradient by this, to see that it is noticed");
  command->callback(
      [&action, words] { action = [words] { return fuzz::Fuzzer(words->options).run(); }; });
}

} // namespace fsdp::cli
