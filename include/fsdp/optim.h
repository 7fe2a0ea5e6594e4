#pragma once

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <fsdp/export.h>

/// torch's optimizers on fused kernels: the same constructors, options, state
/// and archives, a few kernel calls per step instead of several operators per
/// parameter. Gradients are read where they are, and every updated parameter's
/// version counter moves.
///
/// Before anything changes, a step throws ValueError if a gradient is sparse or
/// does not fit its parameter, or if the parameter was sharded, moved or cast
/// after the state was made. A tensor that is listed twice (tied weights) is
/// updated once, as in Python; torch's C++ optimizers update it twice.
namespace fsdp::optim {

class FSDP_API AdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

class FSDP_API SGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override;
};

} // namespace fsdp::optim
