#pragma once

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <fsdp/export.h>
#include <fsdp/low_precision_adamw.h>
#include <fsdp/muon.h>

/// torch's optimizers on fused kernels. Constructors, options, state and archives are torch's own.
/// A step makes a few kernel calls instead of several operators per parameter. It increments the
/// version counter of every parameter that it updates, and copies a gradient only if its strides
/// are not those of the parameter.
///
/// A step throws ValueError, before it changes anything, if a gradient is sparse or does not fit
/// its parameter, or if a parameter was sharded, moved or cast after its state was made. A tensor
/// that is listed twice (tied weights) is updated once, as in Python; torch's C++ optimizers
/// update it twice.
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
