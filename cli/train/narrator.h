#pragma once

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <vector>

#include "cli/train/corpus.h"
#include "cli/train/fit.h"
#include "cli/train/metrics.h"
#include "cli/train/options.h"
#include "cli/train/plan.h"
#include "cli/train/progress.h"

namespace fsdp::cli {

/// The results of a run.
struct RunResult {
  double first_loss = 0;
  double last_loss = 0; // the mean over the last `num_last` steps
  int64_t num_last = 0;
  Validation validation;
  double seconds = 0;
};

/// Reports a run on stdout: as lines for people, as one JSON object per line (--json), or only the
/// result (--quiet). Only rank 0 prints (`prints`); calls on the other ranks do nothing.
class Narrator {
 public:
  Narrator(const TrainOptions& options, bool prints);

  /// Prints the sizes, memory and traffic that the run will have.
  void plan(const Plan& plan, const Fit& fit, int64_t shard_bytes, const std::string& backend);
  void text(const Corpus& corpus);
  void resumed(const SavedRun& saved, const Lost& lost);
  void begin(int64_t steps_before);

  void step(const StepRecord& record);
  void validation(const Validation& validation);

  void stopped(const std::string& signal, int64_t step);
  void curve(const std::vector<double>& losses);
  void result(const RunResult& result);
  void sample(const std::string& prompt, const std::string& text);
  /// Prints where checkpoint and report are, and the command that resumes the run.
  void saved(const std::string& run, const std::string& checkpoint, int64_t steps);

  double seconds() const {
    return progress_ ? progress_->seconds() : 0;
  }
  bool wants_sample() const {
    return !options_.quiet;
  }

 private:
  bool to_people() const {
    return prints_ && !options_.quiet && !options_.json;
  }
  bool to_programs() const {
    return prints_ && options_.json;
  }
  /// Models of --from have tokens of their own, unless those are bytes.
  bool trains_on_bytes() const {
    const auto& config = options_.identity.config;
    return Corpus::is_text(options_.identity.data) &&
           (config.from.empty() || config.model.vocab == 256);
  }
  static void print(const char* event, const nlohmann::ordered_json& fields);
  /// The lines of `plan` for people.
  void show_plan(const Plan& plan, const Fit& fit, int64_t shard_bytes, const std::string& backend);

  const TrainOptions& options_;
  const bool prints_;
  Screen screen_;
  std::optional<Progress> progress_;
};

} // namespace fsdp::cli
