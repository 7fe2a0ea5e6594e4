#include "cli/fuzz/run.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cctype>
#include <chrono>
#include <mutex>

#include <fsdp/distributed.h>

#include "cli/fuzz/rank_run.h"

namespace fsdp::cli::fuzz {

namespace {

/// Cases provoke warnings.
class NoWarnings : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

/// The first line of an error without names and numbers, which differ from case to case.
std::string kind_of(const std::string& message) {
  std::string kind;
  bool quoted = false;
  char before = ' ';
  for (const char letter : message.substr(0, message.find('\n'))) {
    const bool apostrophe = !quoted && std::isalpha(static_cast<unsigned char>(before)) != 0;
    before = letter;
    if (letter == '\'' && !apostrophe) {
      quoted = !quoted;
    } else if (!quoted && std::isdigit(static_cast<unsigned char>(letter)) == 0) {
      kind += letter;
    }
  }
  return "throws: " + kind.substr(0, 160);
}

} // namespace

Outcome run_case(const Case& c) {
  Outcome outcome;
  std::mutex mutex;
  try {
    run_ranks(
        c.ranks,
        [&](int rank) {
          NoWarnings handler;
          const c10::WarningUtils::WarningHandlerGuard guard(&handler);
          RankRun run(c, rank);
          try {
            run.run();
            const auto parameters = run.final_parameters();
            const std::lock_guard lock(mutex);
            outcome.num_comparisons += run.num_comparisons();
            if (rank == 0) {
              outcome.parameters = parameters;
            }
          } catch (const Difference& difference) {
            const std::lock_guard lock(mutex);
            if (!outcome.failure) {
              outcome.failure = Failure{difference.kind, difference.what()};
            }
            throw;
          }
        },
        {.timeout = std::chrono::seconds(60), .intra_op_threads = 1});
  } catch (const c10::Error& error) {
    if (!outcome.failure) {
      outcome.failure =
          Failure{kind_of(error.what_without_backtrace()), error.what_without_backtrace()};
    }
  } catch (const std::exception& error) {
    if (!outcome.failure) {
      outcome.failure = Failure{kind_of(error.what()), error.what()};
    }
  }
  return outcome;
}

} // namespace fsdp::cli::fuzz
