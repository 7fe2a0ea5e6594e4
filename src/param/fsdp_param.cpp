#include "param/fsdp_param.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <utility>

namespace fsdp::detail {

namespace {

namespace autograd = torch::autograd;

constexpr uint32_t kFirstUnshardedVersion = 0x40000000;

/// Takes the place of torch's AccumulateGrad while the unsharded face is
/// shown: adds into the slot instead of `.grad`.
class UnshardedAccumulator : public autograd::Node {
 public:
  UnshardedAccumulator(
      at::Tensor param,
      const at::Tensor& unsharded,
      std::string name,
      const std::shared_ptr<at::Tensor>& slot)
      : Node(/*sequence_nr=*/UINT64_MAX), // as soon as it is ready, like torch's
        param_(std::move(param)),
        unsharded_(unsharded),
        name_(std::move(name)),
        slot_(slot) {
    add_input_metadata(unsharded);
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
        !grad.is_sparse(), "fsdp: parameter '", name_,
        "' got a sparse gradient, which cannot be reduced; build its module with sparse(false)");
    at::NoGradGuard no_grad; // sharded gradients carry no graph
    autograd::AccumulateGrad::accumulateGrad(
        unsharded_, *slot, grad, /*num_expected_refs=*/1,
        [&](at::Tensor&& sum) { *slot = std::move(sum); });
    return {};
  }

  // Hooks that the user registered on the parameter.
  std::vector<std::unique_ptr<autograd::FunctionPreHook>>& tensor_pre_hooks() noexcept override {
    return autograd::impl::hooks(param_);
  }
  std::string name() const override {
    return "FsdpAccumulateGrad";
  }

 private:
  const at::Tensor param_;
  const at::Tensor unsharded_;
  const std::string name_;
  const std::weak_ptr<at::Tensor> slot_;
};

} // namespace

FSDPParam::FSDPParam(at::Tensor param, std::string name, ShardGeometry geometry)
    : param_(std::move(param)),
      name_(std::move(name)),
      geometry_(std::move(geometry)),
      dtype_(param_.scalar_type()),
      sharded_version_(0u),
      unsharded_version_(kFirstUnshardedVersion),
      sharded_accumulator_(weak_node(NodePtr())),
      unsharded_grad_(std::make_shared<at::Tensor>()) {}

void FSDPParam::attach(at::Tensor sharded, at::Tensor unsharded) {
  at::NoGradGuard no_grad;
  sharded_ = sharded.variable_data();
  unsharded_ = unsharded.variable_data();
  if (!param_.is_meta()) {
    sharded_.copy_(param_.detach().narrow(
        geometry_.dim, geometry_.offset, geometry_.shard_sizes[geometry_.dim]));
  }
  auto* impl = param_.unsafeGetTensorImpl();
  impl->shallow_copy_from(sharded_.getIntrusivePtr());
  impl->set_version_counter(sharded_version_);
}

void FSDPParam::check_not_replaced() const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      face_ == Face::Unsharded ||
          (param_.storage().unsafeGetStorageImpl() == sharded_.storage().unsafeGetStorageImpl() &&
           param_.storage_offset() == sharded_.storage_offset() && param_.scalar_type() == dtype_),
      "[fully_shard] the data of parameter '", name_,
      "' was replaced after sharding (Module::to, set_data or an assignment), which is not "
      "supported yet; convert the module first, and write into a shard with copy_");
}

void FSDPParam::show(Face face) {
  if (face == face_) {
    return;
  }
  auto* impl = param_.unsafeGetTensorImpl();
  if (face == Face::Unsharded) {
    sharded_accumulator_ = weak_node(autograd::impl::try_get_grad_accumulator(param_));
    impl->shallow_copy_from(unsharded_.getIntrusivePtr());
    impl->set_version_counter(unsharded_version_);
    if (!unsharded_accumulator_) {
      unsharded_accumulator_ =
          make_node<UnshardedAccumulator>(param_, unsharded_, name_, unsharded_grad_);
    }
    // Also for a frozen parameter: it may be unfrozen later.
    autograd::impl::set_grad_accumulator(param_, weak_node(unsharded_accumulator_));
  } else {
    impl->shallow_copy_from(sharded_.getIntrusivePtr());
    impl->set_version_counter(sharded_version_);
    autograd::impl::set_grad_accumulator(param_, sharded_accumulator_);
  }
  face_ = face;
}

at::Tensor FSDPParam::take_unsharded_grad() {
  return std::exchange(*unsharded_grad_, at::Tensor());
}

void FSDPParam::add_sharded_grad(at::Tensor grad) {
  at::NoGradGuard no_grad;
  auto& sharded_grad = param_.mutable_grad();
  if (sharded_grad.defined()) {
    sharded_grad.add_(grad);
  } else {
    sharded_grad = grad.variable_data();
  }
}

} // namespace fsdp::detail
