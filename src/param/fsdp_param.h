#pragma once

#include <ATen/core/Tensor.h>

#include <fsdp/extension.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "param/data_parallel_mesh.h"
#include "param/shard_geometry.h"
#include "param/user_param.h"
#include "runtime/autograd_compat.h"

namespace fsdp::detail {

// Note [One tensor, two faces]
//
// A module holds each parameter as a member and in its parameter dict, and an optimizer holds it
// once more. All of them point at one TensorImpl. So the TensorImpl stays, and its content changes
// between two faces:
//
//              unshard: gather, copy out, show unsharded
//          ------------------------------------------------>
//  sharded face                                     unsharded face
//  this rank's shard, a view of the                 the whole parameter, a view of the
//  group's flat shard buffer, in its                group's freeable buffer, in the dtype
//  own dtype, perhaps on the host                   and on the device of compute
//          <------------------------------------------------
//              reshard: show sharded, free the buffer
//
// - `.grad` is always the sharded gradient, whichever face is shown. Backward's gradient of the
//   unsharded face goes into a slot here, through a gradient accumulator of our own, and from there
//   into the reduction.
// - Each face has its own version counter. The unsharded one starts at a far higher number, so a
//   graph that was built on one face throws if it meets the other face. With equal counters a
//   shard could be broadcast silently.
// - A face is a view, but autograd does not know this (`variable_data`). Otherwise `zero_grad`
//   could not detach it in place.
// - If somebody replaces the content of the tensor (Module::to, set_data), this is noticed before
//   the face changes. The new content, a shard or the whole parameter, is adopted.

// Note [Opaque parameters]
//
// A tensor subclass of Python may have several tensors inside, and another form when it is whole
// (fp8 with a scale, for example). The engine cannot keep it in flat buffers. It knows sizes and
// dtype, and shards and reduces the gradients. Both faces are stand-ins without memory. The user
// holds the shard; the parameter's extension sends it, and makes the leaf that modules use.

/// One managed parameter: its geometry, its two faces, and its unsharded gradient until the
/// gradient is reduced.
class FSDPParam {
 public:
  /// `param` is the whole parameter, contiguous. This rank keeps only its part.
  FSDPParam(
      at::Tensor param,
      std::string name,
      const DataParallelMesh& mesh,
      ShardGeometry geometry,
      bool opaque = false);
  ~FSDPParam();
  FSDPParam(FSDPParam&&) = delete; // `find` returns its address

  /// The object that manages `tensor`, or null.
  static FSDPParam* find(const at::Tensor& tensor);
  static FSDPParam* find(const at::TensorImpl* tensor);
  /// The object whose unsharded gradient `node` accumulates, or null.
  static FSDPParam* of_accumulator(const torch::autograd::Node* node);

  const std::string& name() const {
    return slot_->name;
  }
  void set_name(std::string name) {
    slot_->name = std::move(name);
  }
  const ShardGeometry& geometry() const {
    return geometry_;
  }
  const DataParallelMesh& mesh() const {
    return mesh_;
  }
  /// The engine's tensor, which modules see while it is whole.
  const at::Tensor& tensor() const {
    return param_;
  }
  /// The holder of the parameter at rest. By default it holds `tensor()`.
  const UserParam& user() const {
    return *user_;
  }
  /// See Note [Opaque parameters].
  bool is_opaque() const {
    return opaque_;
  }
  /// Called once, while the tensor shows its sharded face.
  void set_user(std::shared_ptr<UserParam> user);
  /// The dtype of the shard, its gradient and its optimizer state. Follows the content that the
  /// user has put into the tensor last.
  at::ScalarType dtype() const {
    return face_ == Face::Sharded ? param_.scalar_type() : sharded_.scalar_type();
  }

  // ---- Faces

  /// Returns this rank's part of a tensor of the whole parameter's sizes.
  at::Tensor part_of(const at::Tensor& whole) const;
  /// Returns this rank's part of the tensor's content, which is the whole parameter or its shard.
  /// The tensor must show its sharded face. Throws ValueError if the sizes fit neither.
  at::Tensor shard_values() const;
  /// Sets the memory of both faces and shows the sharded one. Copies shard_values() into `sharded`.
  /// The memory of `unsharded` may be freed.
  void attach(const at::Tensor& sharded, const at::Tensor& unsharded);

  Face face() const {
    return face_;
  }
  /// Shows this face in the engine's tensor.
  void show(Face face);
  /// Shows this face to the user, see UserParam.
  void show_to_user(Face face);
  /// Returns true if somebody replaced the tensor's content.
  bool was_replaced() const;
  /// Takes over what the user holds in the place of the shard. The tensor must show its sharded
  /// face.
  void take_replacement();
  /// Increases when somebody, for example an optimizer, writes into the shard.
  uint32_t shard_version() const {
    return sharded_version_.current_version();
  }
  /// Returns true if somebody wrote into the unsharded face since the last call.
  bool check_and_clear_unsharded_edit();

  const at::Tensor& sharded() const {
    return sharded_;
  }
  /// The unsharded view, whichever face is shown.
  const at::Tensor& unsharded() const {
    return unsharded_;
  }

  // ---- Gradients

  /// The gradient that backward has computed so far, or an undefined tensor.
  const at::Tensor& unsharded_grad() const {
    return slot_->grad;
  }
  at::Tensor take_unsharded_grad();
  void drop_unsharded_grad() {
    slot_->grad.reset();
  }
  /// Casts the unsharded gradient, so that further gradients are added in `dtype`.
  void accumulate_in(at::ScalarType dtype);
  /// `on_grad` is called whenever backward adds to the unsharded gradient.
  void set_on_grad(std::function<void()> on_grad) {
    slot_->on_grad = std::move(on_grad);
  }
  /// Sets the dtype in which gradients are summed over ranks. If empty, they keep their own.
  void set_reduce_dtype(std::optional<at::ScalarType> dtype) {
    slot_->reduce_dtype = dtype;
  }
  /// True if `grad` is this rank's term of a sum that the engine computes itself, in the reduce
  /// dtype, before it adds the gradient to the unsharded one.
  bool sums_itself(const at::Tensor& grad) const {
    return slot_->sums_itself(grad);
  }
  /// The gradient after its reduction over the shard ranks and before that over the replicas, in
  /// the reduce dtype. Undefined otherwise.
  at::Tensor partial_grad;
  /// Adds `grad` to the user's `.grad`. Then calls the parameter's post-accumulate-grad hooks.
  void add_sharded_grad(const at::Tensor& grad);
  /// Is alive while a thread updates the shard during backward, see ReducedGrads.
  std::weak_ptr<void> update;
  /// Throws if `update` is alive. The message begins with `api`.
  void check_updated(const char* api) const;

  // ---- Extension

  /// An opaque parameter has one before it is gathered.
  std::shared_ptr<AllGatherExtension> extension;
  bool is_extended() const {
    return opaque_ || extension;
  }
  AllGatherInfo gather_info() const;
  /// Frees the memory of the user's leaf, see UserParam.
  void free_leaf() {
    user_->free_leaf();
  }

 private:
  friend class UnshardedAccumulator;
  /// Shared with the accumulator, which may outlive the FSDPParam and holds the slot weakly.
  struct Slot {
    at::Tensor grad;
    std::string name;
    std::function<void()> on_grad;
    std::function<at::Tensor(const at::Tensor& grad)> sum_grad; // see TensorPiece
    // The user's tensor at rest is another one than inside forward, with hooks of its own.
    bool has_own_leaf = false;
    std::optional<at::ScalarType> reduce_dtype;

    bool sums_itself(const at::Tensor& of) const {
      return sum_grad && reduce_dtype && *reduce_dtype != of.scalar_type() &&
             at::isFloatingType(of.scalar_type());
    }
  };

  bool holds(const at::Tensor& shown) const;
  void accumulate_grads_of(const at::Tensor& leaf);
  void forget_leaf();

  const at::Tensor param_;
  std::shared_ptr<UserParam> user_;
  const DataParallelMesh mesh_;
  const ShardGeometry geometry_;
  const bool opaque_;
  Face face_ = Face::Sharded;

  at::Tensor sharded_;   // ND
  at::Tensor guarded_;   // its alias that the tensor shows at rest, see Note [Guarded shards]
  at::Tensor unsharded_; // ND
  c10::VariableVersion sharded_version_;
  c10::VariableVersion unsharded_version_;
  uint32_t seen_unsharded_version_;
  WeakNodePtr sharded_accumulator_; // torch's own, kept while the unsharded face is shown
  NodePtr unsharded_accumulator_;
  at::Tensor leaf_; // the user's, see UserParam
  NodePtr leaf_accumulator_;
  std::shared_ptr<Slot> slot_;
};

/// A tensor of these sizes whose elements are all the same one.
at::Tensor stand_in(at::IntArrayRef sizes, const at::TensorOptions& options);

} // namespace fsdp::detail
