#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <memory>

namespace fsdp::detail {

enum class Face : std::uint8_t { Sharded, Unsharded };

/// The user's side of a parameter at rest: the tensor that an optimizer updates and that gets the
/// gradient. A C++ user holds the engine's own tensor (OwnTensor). A Python user holds a DTensor,
/// and sees the engine's tensor only while it is whole.
class UserParam {
 public:
  virtual ~UserParam() = default;

  /// The tensor whose requires_grad, `.grad` and hooks count.
  virtual const at::Tensor& tensor() const = 0;
  /// What to do if an operator got the shard in the place of the whole parameter.
  virtual const char* way_out() const = 0;
  /// Adds this rank's part of the gradient to `.grad`. Called with grad mode off.
  virtual void add_grad(const at::Tensor& grad) = 0;

  /// Returns an object that is held while several parameters of a group are used, in the place of
  /// a lock for each. Python's lock, for example.
  virtual std::shared_ptr<void> begin() const {
    return nullptr;
  }
  /// The engine's tensor shows this face now.
  virtual void shown(Face /*face*/) {}
  /// Returns the leaf that modules use in the place of the engine's tensor while that is whole, if
  /// there is such a leaf. `whole` has its memory. The next shard that is attached has another one.
  virtual at::Tensor leaf(const at::Tensor& /*whole*/) {
    return {};
  }
  /// Modules do not use the leaf now: memory of its own can be freed until `leaf` is called again.
  virtual void free_leaf() {}
  /// Converts a gradient of the leaf to one of the engine's tensor. Ranks of tensor parallelism may
  /// communicate for it.
  virtual at::Tensor grad_of_whole(const at::Tensor& grad) const {
    return grad;
  }
  /// Returns the part of a gradient that is in this rank's memory.
  virtual at::Tensor local(const at::Tensor& grad) const {
    return grad;
  }
  /// The shard has new memory. Its version counter is the one that the engine looks at.
  virtual void attached(const at::Tensor& /*shard*/) {}
  /// Returns the tensor that the user has put in the place of the attached shard, or an undefined
  /// one.
  virtual at::Tensor replacement() const {
    return {};
  }
};

/// The engine's own tensor. The engine changes its content, see Note [One tensor, two faces], and
/// notices by itself when the user does.
class OwnTensor : public UserParam {
 public:
  explicit OwnTensor(at::Tensor tensor) : tensor_(std::move(tensor)) {}

  const at::Tensor& tensor() const override {
    return tensor_;
  }
  const char* way_out() const override;
  void add_grad(const at::Tensor& grad) override;
  void attached(const at::Tensor& shard) override;

 private:
  const at::Tensor tensor_;
};

} // namespace fsdp::detail
