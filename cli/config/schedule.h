#pragma once

#include <cstdint>
#include <string>

namespace fsdp::cli {

/// The learning rate over a run: up along a line, then down.
struct Schedule {
  std::string kind = "cosine"; // linear, constant
  double lr = 2e-3;            // at its highest
  double min_lr = -1;          // at the end; -1: a tenth of `lr`
  int64_t warmup = -1;         // steps; -1: a tenth of all
};

/// Throws ConfigError that names the option and the way out.
void check(const Schedule& schedule, int64_t steps);

/// `step` counts from 0.
double learning_rate(const Schedule& schedule, int64_t step, int64_t steps);

} // namespace fsdp::cli
