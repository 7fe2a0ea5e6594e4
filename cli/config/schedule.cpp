#include "cli/config/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "cli/check.h"

namespace fsdp::cli {

void check(const Schedule& schedule, int64_t steps) {
  check_config(
      schedule.lr > 0 && std::isfinite(schedule.lr), "--lr ", schedule.lr,
      ": it must be above 0, and finite");
  check_config(
      schedule.min_lr == -1 || (schedule.min_lr >= 0 && schedule.min_lr <= schedule.lr),
      "--min-lr ", schedule.min_lr, ": it must be 0 or more, and not above --lr ", schedule.lr);
  check_config(
      schedule.kind != "constant" || schedule.min_lr == -1,
      "--min-lr has no meaning with --schedule constant; use linear or cosine, or leave it out");
  check_config(
      schedule.warmup >= -1 && schedule.warmup <= steps, "--warmup ", schedule.warmup,
      ": it must be 0 or more, and not above --steps ", steps);
}

double learning_rate(const Schedule& schedule, int64_t step, int64_t steps) {
  const auto warmup = schedule.warmup >= 0 ? schedule.warmup : std::max<int64_t>(1, steps / 10);
  if (step < warmup) {
    return schedule.lr * static_cast<double>(step + 1) / static_cast<double>(warmup);
  }
  const auto part = static_cast<double>(step - warmup) /
                    static_cast<double>(std::max<int64_t>(1, steps - warmup));
  const auto least = schedule.min_lr >= 0 ? schedule.min_lr : schedule.lr / 10;
  const auto left = schedule.kind == "cosine"   ? 0.5 * (1 + std::cos(std::numbers::pi * part))
                    : schedule.kind == "linear" ? 1 - part
                                                : 1.0;
  return schedule.kind == "constant" ? schedule.lr : least + (schedule.lr - least) * left;
}

} // namespace fsdp::cli
