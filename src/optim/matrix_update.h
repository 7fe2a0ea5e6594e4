#pragma once

#include <ATen/core/Tensor.h>
#include <fsdp/muon.h>

#include <optional>
#include <vector>

#include "param/param_placement.h"

namespace fsdp::detail {

/// A parameter whose matrices Muon updates. The tensors are this rank's parts.
struct MatrixUpdate {
  size_t group = 0; // of the optimizer
  size_t index = 0; // in the group
  at::Tensor param;
  at::Tensor grad;                // undefined if the parameter is to stay as it is
  std::optional<TensorSpec> spec; // none if this rank has the whole parameter
  const optim::MuonOptions* options = nullptr;
  at::Tensor momentum = {};

  /// The sizes of the whole parameter.
  std::vector<int64_t> sizes() const;
  /// The device on which the matrices are exchanged and computed.
  at::Device device() const;
};

/// Throws ValueError if an option has an invalid value.
void check_options(const optim::MuonOptions& options);

/// Throws ValueError if an option has an invalid value, or if Muon cannot update the parameter.
void check(const MatrixUpdate& update);

/// Throws ValueError on all ranks if ranks that share parameters bring other ones, or other
/// options, or if a parameter has a gradient only on some of them. Collective over these ranks. A
/// GPU would have to finish its work for the comparison. So tensors on GPUs are compared only if
/// `with_gpus`.
void compare_ranks(
    const std::vector<MatrixUpdate>& updates, int64_t exchange_numel, bool with_gpus);

} // namespace fsdp::detail
