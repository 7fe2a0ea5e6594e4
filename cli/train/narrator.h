#pragma once

#include <nlohmann/json.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/train/corpus.h"
#include "cli/train/metrics.h"
#include "cli/train/options.h"
#include "cli/train/plan.h"
#include "cli/train/progress.h"

namespace fsdp::cli {

/// How a run ended.
struct RunResult {
  double first_loss = 0;
  double last_loss = 0; // the mean of the last `num_last`
  int64_t num_last = 0;
  Validation validation;
  double seconds = 0;
};

/// Tells of a run on stdout: in lines for people, as one JSON object per line
/// (--json), or the result alone (--quiet). Only rank 0 speaks; the others' calls
/// do nothing.
class Narrator {
 public:
  Narrator(const TrainOptions& options, bool speaks);

  /// What will happen.
  void plan(const Plan& plan, int64_t shard_bytes, const std::string& backend);
  void text(const Corpus& corpus);
  void resumed(const SavedRun& saved);
  void begin(int64_t steps_before);

  void step(const StepRecord& record);
  void validation(const Validation& validation);

  void stopped(const std::string& signal, int64_t step);
  void curve(const std::vector<double>& losses);
  void result(const RunResult& result);
  void sample(const std::string& prompt, const std::string& text);
  /// Where everything is, and the command that goes on.
  void saved(const std::string& run, const std::string& checkpoint, int64_t steps);

  double seconds() const {
    return progress_ ? progress_->seconds() : 0;
  }
  bool wants_sample() const {
    return !options_.quiet;
  }

 private:
  bool to_people() const {
    return speaks_ && !options_.quiet && !options_.json;
  }
  bool to_programs() const {
    return speaks_ && options_.json;
  }
  static void print(const nlohmann::ordered_json& json);

  const TrainOptions& options_;
  const bool speaks_;
  Screen screen_;
  std::optional<Progress> progress_;
};

} // namespace fsdp::cli
