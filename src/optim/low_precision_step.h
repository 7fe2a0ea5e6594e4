#pragma once

#include <ATen/core/Tensor.h>
#include <fsdp/low_precision_adamw.h>

#include <array>
#include <cstddef>
#include <optional>

#include "optim/moment.h"
#include "param/param_placement.h"

namespace fsdp::detail {

inline constexpr auto kLowPrecisionAdamW = "LowPrecisionAdamW";

/// A parameter that LowPrecisionAdamW updates. The tensors are this rank's parts.
struct LowPrecisionStep {
  std::size_t group; // of the optimizer
  std::size_t index; // in the group
  at::Tensor param;
  at::Tensor grad;
  std::optional<TensorSpec> spec; // none if this rank has the whole parameter
  std::array<Moment, 2> moments;
  int64_t num_steps; // that were made before this one
};

/// Throws ValueError if an option has an invalid value.
void check(const optim::LowPrecisionAdamWOptions& options);
/// Throws ValueError if LowPrecisionAdamW cannot update a parameter of this dtype.
void check_param(const at::Tensor& param, std::size_t group, std::size_t index);

void run(const LowPrecisionStep& step, const optim::LowPrecisionAdamWOptions& options);

} // namespace fsdp::detail
