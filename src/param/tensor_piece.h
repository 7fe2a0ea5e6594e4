#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensor/redistribute.h"

namespace fsdp::detail {

// Note [Pieces of model parallelism]
//
// Tensor parallelism keeps a parameter's tensor object and replaces its content by this rank's
// piece. A TensorPiece remembers what it is a piece of, in a table by TensorImpl. fully_shard then
// takes the piece for the whole parameter and shards it over the axes of data parallelism. Only
// param_placement.h combines both: the axes of data parallelism come first in the mesh, and they
// divide last.

/// One parameter that holds this rank's piece of a tensor. Its module keeps the TensorPiece alive.
class TensorPiece : public std::enable_shared_from_this<TensorPiece> {
 public:
  TensorPiece(at::Tensor param, std::string name, TensorSpec spec);
  ~TensorPiece();
  TensorPiece(const TensorPiece&) = delete;
  TensorPiece& operator=(const TensorPiece&) = delete;

  /// The TensorPiece of `tensor`, or null.
  static std::shared_ptr<TensorPiece> find(const at::Tensor& tensor);

  const std::string& name() const {
    return name_;
  }
  const TensorSpec& spec() const {
    return spec_;
  }
  /// Sizes of the pieces of all ranks of the mesh.
  std::vector<std::vector<int64_t>> piece_sizes() const;
  /// Returns this rank's piece of `whole`, which every rank has. No communication.
  at::Tensor piece_of(const at::Tensor& whole) const;

  /// Sums the terms of the gradient that the ranks compute. Empty if each computes all of it.
  std::function<at::Tensor(const at::Tensor& grad)> sum_grad;

 private:
  const at::Tensor param_; // held so that its address is not reused
  const std::string name_;
  const TensorSpec spec_;
};

} // namespace fsdp::detail
