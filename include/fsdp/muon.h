#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include <fsdp/export.h>

namespace fsdp::detail {
class MatrixSteps;
struct MatrixUpdate;
} // namespace fsdp::detail

namespace fsdp::optim {

/// The options of a parameter group. Those of torch.optim.Muon have its names and defaults.
struct FSDP_API MuonOptions : torch::optim::OptimizerCloneableOptions<MuonOptions> {
  using Coefficients = std::tuple<double, double, double>;
  using Betas = std::tuple<double, double>;

  // NOLINTNEXTLINE(google-explicit-constructor): a number is enough, as for torch's options
  MuonOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr);
  TORCH_ARG(double, weight_decay) = 0.1;
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  TORCH_ARG(Coefficients, ns_coefficients) = { 3.4445, -4.7750, 2.0315 };
  TORCH_ARG(double, eps) = 1e-7;
  TORCH_ARG(int64_t, ns_steps) = 5;
  /// Multiplies the learning rate of a matrix by 0.2 * sqrt(max(rows, columns)), so that AdamW's
  /// learning rate and weight decay fit: Python's adjust_lr_fn="match_rms_adamw". Otherwise it is
  /// multiplied by sqrt(max(1, rows / columns)).
  TORCH_ARG(bool, match_rms_adamw) = false;
  /// The dtype of the Newton-Schulz iteration, and of the matrices on their way between ranks.
  TORCH_ARG(at::ScalarType, ns_dtype) = at::kBFloat16;
  /// Takes each matrix as this many matrices, one below the other: the heads of a projection.
  TORCH_ARG(int64_t, blocks) = 1;
  /// Updates all parameters of the group by AdamW: for embeddings and heads.
  TORCH_ARG(bool, adamw) = false;
  TORCH_ARG(Betas, betas) = { 0.9, 0.999 };
  TORCH_ARG(double, adamw_eps) = 1e-8;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;

  /// Whether Muon updates a parameter of `num_dims` dims with these options, and not AdamW.
  bool updates_by_muon(int64_t num_dims) const {
    return !adamw() && num_dims >= 2;
  }
};

/// The state of a parameter: the momentum of Muon, or the step and the moments of AdamW.
struct FSDP_API MuonParamState : torch::optim::OptimizerCloneableParamState<MuonParamState> {
  TORCH_ARG(at::Tensor, momentum_buffer);
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// torch.optim.Muon for sharded parameters. The update of a matrix is its momentum, made nearly
/// orthogonal by a Newton-Schulz iteration. Each matrix is gathered on one rank only, which
/// computes its update and sends every other rank its part. See docs/muon.md.
///
/// A parameter of two dims is a matrix. One of three dims is a stack of matrices, as the weights of
/// experts are. One of four dims or more is a convolution: a matrix with a row for each output
/// channel. Parameters of fewer dims, and groups with the option `adamw`, are updated by AdamW.
///
/// `step` is collective over the ranks that share the parameters: a parameter must have a gradient
/// on all of them or on none. On the CPU the ranks compare in each step what they bring; on a GPU
/// in the first step, and when the parameters that have a gradient change. `step` throws
/// ValueError, before it changes anything, as fsdp::optim::AdamW does.
class FSDP_API Muon : public torch::optim::Optimizer {
 public:
  static constexpr int64_t kExchangeNumel = int64_t{16} << 20;

  explicit Muon(
      const std::vector<torch::optim::OptimizerParamGroup>& groups,
      const MuonOptions& defaults = {});
  explicit Muon(std::vector<at::Tensor> params, const MuonOptions& defaults = {});
  ~Muon() override;

  /// Options of the group are taken as they are. A group without options gets the defaults.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  at::Tensor step(LossClosure closure = nullptr) override;

  /// Sets how many elements of matrices are exchanged at a time, per rank on average. While one
  /// part is computed, the next one is on its way.
  void set_exchange_numel(int64_t numel = kExchangeNumel);

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::vector<detail::MatrixUpdate> matrix_updates() const;

  std::unique_ptr<detail::MatrixSteps> matrices_;
};

} // namespace fsdp::optim
