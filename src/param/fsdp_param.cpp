#include "param/fsdp_param.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <utility>

#include "param/shard_guard.h"
#include "param/tensor_piece.h"
#include "param/tensor_table.h"
#include "runtime/stream.h"

namespace fsdp::detail {

namespace autograd = torch::autograd;

namespace {

constexpr uint32_t kFirstUnshardedVersion = 0x40000000;

TensorTable<FSDPParam*> sharded_params;

} // namespace

/// Replaces torch's AccumulateGrad while the unsharded face is shown. Adds gradients to the slot
/// instead of `.grad`.
class UnshardedAccumulator : public autograd::Node {
 public:
  /// `leaf` is what modules use: the parameter, or the user's own leaf. `like` looks like it.
  UnshardedAccumulator(
      at::Tensor param,
      at::Tensor leaf,
      const at::Tensor& like,
      const std::shared_ptr<FSDPParam::Slot>& slot)
      : Node(/*sequence_nr=*/UINT64_MAX), // runs as soon as it is ready, like torch's
        param_(std::move(param)),
        leaf_(std::move(leaf)),
        like_(like),
        name_(slot->name),
        slot_(slot) {
    add_input_metadata(like);
  }

  autograd::variable_list apply(autograd::variable_list&& grads) override {
    const auto slot = slot_.lock();
    TORCH_CHECK(
        slot, "fsdp: backward reached parameter '", name_, "' after its sharded module was gone");
    auto grad = std::move(grads[0]);
    if (!grad.defined() || !param_.requires_grad()) {
      return {};
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        !grad.is_sparse(), "fsdp: parameter '", slot->name,
        "' got a sparse gradient, which cannot be reduced; build its module with `sparse` off");
    at::NoGradGuard no_grad; // sharded gradients carry no graph
    if (slot->sums_itself(grad)) {
      grad = slot->sum_grad(grad.to(*slot->reduce_dtype));
    }
    accumulate(*slot, grad);
    if (slot->on_grad) {
      slot->on_grad();
    }
    return {};
  }

  // Returns the hooks that the user registered on the leaf, so that autograd runs them here too.
  std::vector<std::unique_ptr<autograd::FunctionPreHook>>& tensor_pre_hooks() noexcept override {
    return autograd::impl::hooks(leaf_);
  }
  std::string name() const override {
    return "FsdpAccumulateGrad";
  }
  const at::Tensor& param() const {
    return param_;
  }

 private:
  void accumulate(FSDPParam::Slot& slot, const at::Tensor& grad) const {
    const auto& hooks = autograd::impl::post_acc_grad_hooks(leaf_);
    const bool has_hooks = slot.has_own_leaf && hooks;
    // A sum in the dtype of the reduction is none of theirs: hooks see gradients in the leaf's
    // dtype.
    const bool apart =
        has_hooks && slot.grad.defined() && slot.grad.scalar_type() != like_.scalar_type();
    auto sum = apart ? std::exchange(slot.grad, at::Tensor()) : at::Tensor();
    autograd::AccumulateGrad::accumulateGrad(
        like_, slot.grad, grad, /*num_expected_refs=*/1,
        [&](at::Tensor&& both) { slot.grad = std::move(both); });
    if (has_hooks) {
      leaf_.mutable_grad() = std::exchange(slot.grad, at::Tensor());
      (*hooks)(leaf_);
      slot.grad = std::exchange(leaf_.mutable_grad(), at::Tensor());
    }
    if (sum.defined()) {
      slot.grad = slot.grad.defined() ? sum.add_(slot.grad) : sum;
    }
  }

  const at::Tensor param_;
  const at::Tensor leaf_;
  const at::Tensor like_;
  const std::string name_; // for a message after the slot is gone
  const std::weak_ptr<FSDPParam::Slot> slot_;
};

namespace {

/// Stops a backward whose forward ran before the parameter was sharded.
class RefuseGradient : public autograd::FunctionPreHook {
 public:
  explicit RefuseGradient(std::string name) : name_(std::move(name)) {}
  autograd::variable_list operator()(const autograd::variable_list& /*grads*/) override {
    TORCH_CHECK(
        false, "[fully_shard] backward reached parameter '", name_,
        "' through a forward that ran before fully_shard, and has a gradient of the whole "
        "parameter; run forward again");
  }

 private:
  const std::string name_;
};

/// Returns true if `node` was made on another stream than the current one. Autograd runs a node on
/// the stream that was current when the node was made. If this is not the stream of forward, the
/// sum of gradients comes too late for post-backward, which reads it, and a captured graph is not
/// joined.
bool is_of_another_stream(const NodePtr& node, c10::Device device) {
  return has_streams(device) && node->input_metadata(0).stream() != current_stream(device);
}

} // namespace

FSDPParam::FSDPParam(
    at::Tensor param,
    std::string name,
    const DataParallelMesh& mesh,
    ShardGeometry geometry,
    bool opaque)
    : param_(std::move(param)),
      user_(std::make_shared<OwnTensor>(param_)),
      mesh_(mesh),
      geometry_(std::move(geometry)),
      opaque_(opaque),
      sharded_version_(0u),
      unsharded_version_(kFirstUnshardedVersion),
      seen_unsharded_version_(kFirstUnshardedVersion),
      sharded_accumulator_(weak_node(NodePtr())),
      slot_(std::make_shared<Slot>()) {
  slot_->name = std::move(name);
  if (const auto piece = TensorPiece::find(param_)) {
    slot_->sum_grad = piece->sum_grad;
  }
  param_.mutable_grad().reset(); // belongs to the whole parameter
  if (const auto earlier = autograd::impl::try_get_grad_accumulator(param_)) {
    earlier->add_pre_hook(std::make_unique<RefuseGradient>(this->name()));
    autograd::impl::set_grad_accumulator(param_, weak_node(NodePtr()));
  }
  const bool is_new = sharded_params.add(param_, this);
  TORCH_INTERNAL_ASSERT(is_new, "parameter '", this->name(), "' is managed already");
}

at::Tensor stand_in(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::zeros(std::vector<int64_t>(sizes.size(), 1), options).expand(sizes);
}

FSDPParam::~FSDPParam() {
  if (face_ == Face::Unsharded) {
    // Our accumulator holds the tensor. The tensor's weak reference would keep the accumulator's
    // memory, and so the tensor itself: a cycle.
    autograd::impl::set_grad_accumulator(param_, sharded_accumulator_);
  }
  forget_leaf(); // for the same reason
  sharded_params.remove(param_);
}

FSDPParam* FSDPParam::find(const at::Tensor& tensor) {
  return find(tensor.unsafeGetTensorImpl());
}

FSDPParam* FSDPParam::find(const at::TensorImpl* tensor) {
  return sharded_params.with(
      tensor, [](FSDPParam* const* param) { return param ? *param : nullptr; });
}

FSDPParam* FSDPParam::of_accumulator(const autograd::Node* node) {
  const auto* accumulator = dynamic_cast<const UnshardedAccumulator*>(node);
  return accumulator ? find(accumulator->param()) : nullptr;
}

// ------------------------------------------------------------ Faces

at::Tensor FSDPParam::part_of(const at::Tensor& whole) const {
  return whole.reshape(geometry_.divided_sizes)
      .narrow(geometry_.dim, geometry_.offset, geometry_.length)
      .reshape(geometry_.shard_sizes);
}

at::Tensor FSDPParam::shard_values() const {
  const UnguardedShards unguarded;
  const auto values = param_.detach();
  if (values.sizes() == geometry_.sizes) {
    return part_of(values);
  }
  TORCH_CHECK_VALUE(
      values.sizes() == geometry_.shard_sizes, "[fully_shard] parameter '", name(),
      "' was given a tensor of sizes ", values.sizes(),
      " after sharding; it takes this rank's shard, ", c10::IntArrayRef(geometry_.shard_sizes),
      ", or the whole parameter, ", c10::IntArrayRef(geometry_.sizes));
  return values;
}

void FSDPParam::attach(const at::Tensor& sharded, const at::Tensor& unsharded) {
  at::NoGradGuard no_grad;
  const UnguardedShards unguarded;
  const auto values = shard_values();
  sharded_ = sharded.variable_data();
  unsharded_ = unsharded.variable_data();
  unsharded_accumulator_ = NodePtr(); // made for the old view's sizes and dtype
  if (!values.is_meta() && !opaque_) {
    sharded_.copy_(values);
  }
  auto* impl = param_.unsafeGetTensorImpl();
  guarded_ = guarded(sharded_);
  impl->shallow_copy_from(guarded_.getIntrusivePtr());
  impl->set_version_counter(sharded_version_);
  sharded_.unsafeGetTensorImpl()->set_version_counter(sharded_version_); // as_dtensor returns it
  user_->attached(sharded_);
}

void FSDPParam::set_user(std::shared_ptr<UserParam> user) {
  user_ = std::move(user);
  slot_->has_own_leaf = !user_->tensor().is_same(param_);
  user_->attached(sharded_);
}

bool FSDPParam::was_replaced() const {
  return !holds(face_ == Face::Sharded ? sharded_ : unsharded_);
}

void FSDPParam::take_replacement() {
  if (const auto values = user_->replacement(); values.defined()) {
    param_.unsafeGetTensorImpl()->shallow_copy_from(values.getIntrusivePtr());
  }
}

bool FSDPParam::holds(const at::Tensor& shown) const {
  return param_.storage().unsafeGetStorageImpl() == shown.storage().unsafeGetStorageImpl() &&
         param_.storage_offset() == shown.storage_offset() &&
         param_.scalar_type() == shown.scalar_type() && param_.sizes() == shown.sizes();
}

bool FSDPParam::check_and_clear_unsharded_edit() {
  const auto version = unsharded_version_.current_version();
  return std::exchange(seen_unsharded_version_, version) != version;
}

void FSDPParam::show(Face face) {
  if (face == face_) {
    return;
  }
  auto* impl = param_.unsafeGetTensorImpl();
  if (face == Face::Unsharded) {
    if (param_.requires_grad() != user_->tensor().requires_grad()) {
      param_.set_requires_grad(!param_.requires_grad());
    }
    sharded_accumulator_ = weak_node(autograd::impl::try_get_grad_accumulator(param_));
    impl->shallow_copy_from(unsharded_.getIntrusivePtr());
    impl->set_version_counter(unsharded_version_);
    if (!unsharded_accumulator_ ||
        is_of_another_stream(unsharded_accumulator_, unsharded_.device())) {
      unsharded_accumulator_ = make_node<UnshardedAccumulator>(param_, param_, unsharded_, slot_);
    }
    // Also set for a frozen parameter, which may be unfrozen later.
    autograd::impl::set_grad_accumulator(param_, weak_node(unsharded_accumulator_));
  } else {
    if (holds(unsharded_)) {
      impl->shallow_copy_from(guarded_.getIntrusivePtr());
    } else if (
        param_.sizes() == unsharded_.sizes() &&
        at::equal(param_.detach(), unsharded_.to(param_.options()))) {
      // The user only moved or cast the tensor (Module::to). Does the same to the shard, which may
      // be more precise than the gathered values.
      impl->shallow_copy_from(sharded_.to(param_.options()).getIntrusivePtr());
    } // else the new content stays, to be adopted
    impl->set_version_counter(sharded_version_);
    autograd::impl::set_grad_accumulator(param_, sharded_accumulator_);
  }
  face_ = face;
}

void FSDPParam::show_to_user(Face face) {
  if (face == Face::Unsharded) {
    if (const auto leaf = user_->leaf(unsharded_); leaf.defined()) {
      accumulate_grads_of(leaf);
    }
  }
  user_->shown(face);
}

void FSDPParam::accumulate_grads_of(const at::Tensor& leaf) {
  if (leaf.is_same(leaf_) && !is_of_another_stream(leaf_accumulator_, leaf.device())) {
    return;
  }
  forget_leaf();
  leaf_ = leaf;
  leaf_accumulator_ = make_node<UnshardedAccumulator>(param_, leaf, leaf, slot_);
  autograd::impl::set_grad_accumulator(leaf, weak_node(leaf_accumulator_));
}

void FSDPParam::forget_leaf() {
  if (leaf_.defined()) {
    autograd::impl::set_grad_accumulator(leaf_, weak_node(NodePtr()));
    leaf_.reset();
    leaf_accumulator_ = NodePtr();
  }
}

// ------------------------------------------------------------ Gradients

at::Tensor FSDPParam::take_unsharded_grad() {
  auto grad = std::exchange(slot_->grad, at::Tensor());
  return grad.defined() ? user_->grad_of_whole(grad) : grad;
}

void FSDPParam::accumulate_in(at::ScalarType dtype) {
  if (slot_->grad.defined()) {
    at::NoGradGuard no_grad;
    slot_->grad = slot_->grad.to(dtype);
  }
}

void FSDPParam::add_sharded_grad(const at::Tensor& grad) {
  at::NoGradGuard no_grad;
  user_->add_grad(grad);
  if (const auto& hooks = autograd::impl::post_acc_grad_hooks(user_->tensor())) {
    (*hooks)(user_->tensor());
  }
}

void FSDPParam::check_updated(const char* api) const {
  TORCH_CHECK(
      update.expired(), api, " parameter '", name(),
      "' is still being updated by the StepInBackward; call its finish() after each backward, and "
      "set_is_last_backward(false) before each backward but the last one of a step");
}

// ------------------------------------------------------------ Extension

AllGatherInfo FSDPParam::gather_info() const {
  return {
      .name = name(),
      .mesh = mesh_.shard_mesh().value_or(mesh_.mesh),
      .sizes = geometry_.sizes,
      .shard_dim = geometry_.dim,
      .param_dtype = unsharded_.scalar_type()};
}

} // namespace fsdp::detail
