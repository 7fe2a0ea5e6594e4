#pragma once

#include <ATen/core/Tensor.h>

#include <fsdp/extension.h>

#include <functional>
#include <memory>
#include <string>

#include "param/autograd_compat.h"
#include "param/data_parallel_mesh.h"
#include "param/shard_geometry.h"

namespace fsdp::detail {

// Note [One tensor, two faces]
//
// A module holds each parameter as a member and in its parameter dict, an
// optimizer holds it once more; all point at one TensorImpl. So that one stays,
// and what it shows changes:
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
// - `.grad` is always the sharded gradient, whichever face is shown. What
//   backward computes for the unsharded face goes into a slot here, by a
//   gradient accumulator of our own, and from there into the reduction.
// - Each face has its own version counter, the unsharded one from far away: a
//   graph built on one face that meets the other one throws, where equal
//   counters would let a shard be broadcast silently.
// - A face is a view, but not one that autograd knows of (`variable_data`):
//   else `zero_grad` could not detach it in place.
// - Whoever replaces the content of the tensor (Module::to, set_data) is
//   noticed before the face changes, and what they put there is adopted: a
//   shard, or the whole parameter.

enum class Face : std::uint8_t { Sharded, Unsharded };

/// One managed parameter: its geometry, its two faces, and the gradient of the
/// unsharded one until it is reduced.
class FSDPParam {
 public:
  /// Takes a whole, contiguous parameter, of which this rank keeps its part.
  FSDPParam(
      at::Tensor param, std::string name, const DataParallelMesh& mesh, ShardGeometry geometry);
  ~FSDPParam();
  FSDPParam(FSDPParam&&) = delete; // known by address

  /// The one that manages this tensor, or null.
  static FSDPParam* find(const at::Tensor& tensor);

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
  /// The user's tensor.
  const at::Tensor& tensor() const {
    return param_;
  }
  /// Of the shard, its gradient and its optimizer state; of what the user has
  /// put there last.
  at::ScalarType dtype() const {
    return face_ == Face::Sharded ? param_.scalar_type() : sharded_.scalar_type();
  }

  // ---- Faces

  /// This rank's part of what the tensor holds now: the whole parameter, or
  /// its shard. For a tensor that shows its sharded face. Throws if it is
  /// neither.
  at::Tensor shard_values() const;
  /// Gives the parameter its memory: its shard, which gets the values above,
  /// and the unsharded view, which may be freed. Shows the sharded face.
  void attach(at::Tensor sharded, at::Tensor unsharded);

  Face face() const {
    return face_;
  }
  void show(Face face);
  /// Whether the content of the tensor is another one than it was given.
  bool was_replaced() const;
  /// Moves when somebody, an optimizer for example, writes into the shard.
  uint32_t shard_version() const {
    return sharded_version_.current_version();
  }
  /// Whether somebody wrote into the unsharded face since the last call.
  bool take_unsharded_edit();

  const at::Tensor& sharded() const {
    return sharded_;
  }
  /// The unsharded view, whichever face is shown.
  const at::Tensor& unsharded() const {
    return unsharded_;
  }

  // ---- Gradients

  /// What backward has computed so far, or an undefined tensor.
  const at::Tensor& unsharded_grad() const {
    return slot_->grad;
  }
  at::Tensor take_unsharded_grad();
  /// Casts it, so that what comes is added in that dtype.
  void accumulate_in(at::ScalarType dtype);
  /// Called in backward when a part of it arrives.
  void set_on_grad(std::function<void()> on_grad) {
    slot_->on_grad = std::move(on_grad);
  }
  /// Reduced over the shards' ranks, but not over the replicas yet; in the reduce
  /// dtype.
  at::Tensor partial_grad;
  /// Adds `grad` to `.grad`, or makes it that, and calls the parameter's
  /// post-accumulate-grad hooks.
  void add_sharded_grad(const at::Tensor& grad);

  // ---- Extension

  std::shared_ptr<AllGatherExtension> extension;
  AllGatherInfo gather_info() const;

 private:
  friend class UnshardedAccumulator;
  /// What the accumulator needs, and may outlive us.
  struct Slot {
    at::Tensor grad;
    std::string name;
    std::function<void()> on_grad;
  };

  const at::Tensor param_;
  const DataParallelMesh mesh_;
  const ShardGeometry geometry_;
  Face face_ = Face::Sharded;

  at::Tensor sharded_;   // ND
  at::Tensor unsharded_; // ND
  c10::VariableVersion sharded_version_;
  c10::VariableVersion unsharded_version_;
  uint32_t seen_unsharded_version_;
  WeakNodePtr sharded_accumulator_; // torch's own, while the other is shown
  NodePtr unsharded_accumulator_;
  std::shared_ptr<Slot> slot_;
};

} // namespace fsdp::detail
