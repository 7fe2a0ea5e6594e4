#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include <fsdp/export.h>

namespace fsdp::optim {

/// The options of a parameter group. Those of torch.optim.AdamW have its names and defaults.
struct FSDP_API LowPrecisionAdamWOptions
    : torch::optim::OptimizerCloneableOptions<LowPrecisionAdamWOptions> {
  using Betas = std::tuple<double, double>;

  // NOLINTNEXTLINE(google-explicit-constructor): a number is enough, as for torch's options
  LowPrecisionAdamWOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr);
  TORCH_ARG(Betas, betas) = { 0.9, 0.999 };
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;
  /// How the moments are stored: kBFloat16, kFloat, or kFloat8_e4m3fn, which takes a byte for each
  /// element and a scale for each 256 of them.
  TORCH_ARG(at::ScalarType, moments) = at::kBFloat16;
  /// Rounds stochastically. If false, rounds to the nearest number, which loses small updates.
  TORCH_ARG(bool, stochastic_rounding) = true;
  /// Runs with other seeds are rounded in other ways.
  TORCH_ARG(int64_t, seed) = 0;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;
};

/// The state of a parameter. Its tensors have the parameter's sizes, except the scales of 8-bit
/// moments.
struct FSDP_API LowPrecisionAdamWParamState
    : torch::optim::OptimizerCloneableParamState<LowPrecisionAdamWParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);
  /// With 8-bit moments, this holds the square root of the moment.
  TORCH_ARG(at::Tensor, exp_avg_sq);
  TORCH_ARG(at::Tensor, exp_avg_scale);
  TORCH_ARG(at::Tensor, exp_avg_sq_scale);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// AdamW for parameters in bf16 that have no copy in fp32, with moments in 16 or 8 bits. It
/// computes in fp32, a part of a parameter at a time, and rounds the results stochastically, so
/// that small updates count on average. Parameters in fp32 stay exact; their moments are rounded.
///
/// The rounding depends on the seed, the step, the parameter and the position of the element in
/// the whole parameter. So replicas stay equal, and a resumed run gives the same bits. Any number
/// of ranks rounds alike, except with 8-bit moments: other elements share a scale then. State
/// dicts hold copies of 8-bit moments, in bf16, which loses nothing. See docs/low_precision.md.
///
/// `step` throws ValueError, before it changes anything, as fsdp::optim::AdamW does.
class FSDP_API LowPrecisionAdamW : public torch::optim::Optimizer {
 public:
  explicit LowPrecisionAdamW(
      const std::vector<torch::optim::OptimizerParamGroup>& groups,
      const LowPrecisionAdamWOptions& defaults = {});
  explicit LowPrecisionAdamW(
      std::vector<at::Tensor> params, const LowPrecisionAdamWOptions& defaults = {});

  /// Options of the group are taken as they are. A group without options gets the defaults.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  at::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

} // namespace fsdp::optim
