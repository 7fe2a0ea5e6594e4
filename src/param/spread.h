#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "tensor/redistribute.h"

namespace fsdp::detail {

// Note [Pieces of model parallelism]
//
// Tensor parallelism leaves a parameter the tensor that it is: its content
// becomes this rank's piece, and what that is a piece of is remembered here, by
// TensorImpl. fully_shard then takes the piece for the whole parameter and
// shards it over the axes of data parallelism. Only whoever asks for the whole
// (param_placement.h) puts the two together: the axes of data parallelism come
// first in the mesh, and divide last.

/// One parameter that holds this rank's piece of a tensor; kept by its module.
class Spread : public std::enable_shared_from_this<Spread> {
 public:
  Spread(at::Tensor param, std::string name, TensorSpec spec);
  ~Spread();
  Spread(const Spread&) = delete;
  Spread& operator=(const Spread&) = delete;

  /// The one of this tensor, or null.
  static std::shared_ptr<Spread> find(const at::Tensor& tensor);

  const std::string& name() const {
    return name_;
  }
  const TensorSpec& spec() const {
    return spec_;
  }
  /// Sizes of the pieces of all ranks of the mesh.
  std::vector<std::vector<int64_t>> piece_sizes() const;
  /// This rank's piece of a tensor that every rank has. No communication.
  at::Tensor piece_of(const at::Tensor& whole) const;

  /// Whether what arrives at the parameter is one rank's term of its gradient, and
  /// is summed there.
  bool sums_grads = false;

 private:
  const at::Tensor param_; // its address is not given to another one
  const std::string name_;
  const TensorSpec spec_;
};

} // namespace fsdp::detail
