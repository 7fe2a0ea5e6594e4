#pragma once

#include <cstdint>
#include <string>

namespace fsdp::cli {

/// The highest learning rate of Muon, if none is given: the best of 0.003, 0.01, 0.02 and 0.04 for
/// the default model. (AdamW's best are 0.005 and 0.01.)
constexpr double kMuonLr = 0.01;

/// The learning rate over a run: a linear warm-up, then a decay.
struct Schedule {
  std::string kind = "cosine"; // of the decay: cosine, linear or constant
  double lr = 2e-3;            // the highest rate
  double min_lr = -1;          // the rate at the end; -1: a tenth of `lr`
  int64_t warmup = -1;         // in steps; -1: a tenth of all steps
};

/// Throws ConfigError with a message that names the option and the remedy.
void check(const Schedule& schedule, int64_t steps);

/// The learning rate of a step. `step` counts from 0.
double learning_rate(const Schedule& schedule, int64_t step, int64_t steps);

} // namespace fsdp::cli
