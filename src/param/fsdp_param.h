#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "param/autograd_compat.h"
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
//  group's flat shard buffer                        group's freeable buffer
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

enum class Face : std::uint8_t { Sharded, Unsharded };

/// One managed parameter: its geometry, its two faces, and the gradient of the
/// unsharded one until it is reduced.
class FSDPParam {
 public:
  FSDPParam(at::Tensor param, std::string name, ShardGeometry geometry);

  const std::string& name() const {
    return name_;
  }
  const ShardGeometry& geometry() const {
    return geometry_;
  }
  /// The user's tensor.
  const at::Tensor& tensor() const {
    return param_;
  }
  at::ScalarType dtype() const {
    return dtype_;
  }

  /// Gives the parameter its memory: this rank's shard (filled from the whole
  /// parameter, which it still holds) and the unsharded view, which may be
  /// freed. Shows the sharded face from then on.
  void attach(at::Tensor sharded, at::Tensor unsharded);

  Face face() const {
    return face_;
  }
  /// Throws if the shard was replaced from outside (Module::to, set_data), so
  /// that what is gathered would not be what the user sees.
  void check_not_replaced() const;
  void show(Face face);

  /// The unsharded view, whichever face is shown.
  const at::Tensor& unsharded() const {
    return unsharded_;
  }

  /// The gradient that backward has computed so far, or an undefined tensor.
  const at::Tensor& unsharded_grad() const {
    return *unsharded_grad_;
  }
  at::Tensor take_unsharded_grad();
  /// Adds `grad` to `.grad`, or makes it that.
  void add_sharded_grad(at::Tensor grad);

 private:
  at::Tensor param_;
  std::string name_;
  ShardGeometry geometry_;
  at::ScalarType dtype_;
  Face face_ = Face::Sharded;

  at::Tensor sharded_;   // ND
  at::Tensor unsharded_; // ND
  c10::VariableVersion sharded_version_;
  c10::VariableVersion unsharded_version_;
  WeakNodePtr sharded_accumulator_; // torch's own, while the other is shown
  NodePtr unsharded_accumulator_;
  std::shared_ptr<at::Tensor> unsharded_grad_; // shared with the accumulator, weakly
};

} // namespace fsdp::detail
