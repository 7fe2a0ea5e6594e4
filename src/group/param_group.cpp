#include "group/param_group.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "collective/reduce.h"

namespace fsdp::detail {

namespace {

// Unsharded parameters begin at multiples of this, as if allocated one by one.
constexpr int64_t kAlignment = 256;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// `numel` elements of `dtype` from `offset` on, in elements of `flat`.
at::Tensor typed_view(
    const at::Tensor& flat, int64_t offset, int64_t flat_numel, at::ScalarType dtype) {
  auto view = flat.narrow(0, offset, flat_numel);
  return flat.scalar_type() == dtype ? view : view.view(dtype);
}

/// The beginning of a flat run as a tensor of these sizes.
at::Tensor shaped(const at::Tensor& run, const std::vector<int64_t>& sizes) {
  const auto numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return run.narrow(0, 0, numel).view(sizes);
}

} // namespace

// ------------------------------------------------------------ Initialization

FSDPParamGroup::FSDPParamGroup(
    const std::vector<ParamSpec>& params, ProcessGroup group, std::string name)
    : name_(std::move(name)), group_(std::move(group)) {
  TORCH_CHECK_VALUE(!params.empty(), "[fully_shard] group '", name_, "' has no parameters");
  for (const auto& spec : params) {
    TORCH_CHECK_VALUE(
        spec.param.device() == params.front().param.device(), "[fully_shard] group '", name_,
        "' has parameters on two devices: '", params.front().name, "' on ",
        params.front().param.device(), ", '", spec.name, "' on ", spec.param.device());
    params_.emplace_back(
        spec.param, spec.name,
        shard_geometry(
            spec.name, spec.param.sizes().vec(), spec.shard_dim, group_.size(), group_.rank()));
  }
  lay_out();
  attach_params(params.front().param.options().requires_grad(false).dtype(gather_dtype_));
}

void FSDPParamGroup::lay_out() {
  const auto first = params_.front().dtype();
  const bool uniform = std::all_of(
      params_.begin(), params_.end(), [&](const auto& param) { return param.dtype() == first; });
  gather_dtype_ = uniform ? first : at::kByte;
  const auto unit = static_cast<int64_t>(c10::elementSize(gather_dtype_));
  order_.resize(params_.size());
  std::iota(order_.begin(), order_.end(), 0);
  // Wide elements first: then every one is aligned without gaps.
  std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) {
    return c10::elementSize(params_[a].dtype()) > c10::elementSize(params_[b].dtype());
  });
  parts_.resize(params_.size());
  std::vector<int64_t> numels;
  int64_t shard_offset = 0;
  for (const auto i : order_) {
    const auto size = static_cast<int64_t>(c10::elementSize(params_[i].dtype()));
    auto& part = parts_[i];
    part.numel = params_[i].geometry().padded_numel * size / unit;
    part.shard_offset = shard_offset;
    part.unsharded_offset = unsharded_numel_;
    shard_offset += part.numel;
    unsharded_numel_ += round_up(part.numel * group_.size(), kAlignment / unit);
    numels.push_back(part.numel);
  }
  layout_.emplace(std::move(numels));
}

void FSDPParamGroup::attach_params(const at::TensorOptions& options) {
  at::NoGradGuard no_grad;
  c10::InferenceMode not_inference(false);
  // Zeros, so that padding is the same on every rank and in every run.
  shard_ = at::zeros({layout_->shard_numel}, options);
  if (!alone()) {
    unsharded_.emplace(
        unsharded_numel_, options,
        c10::str(
            "fsdp: the parameters of group '", name_,
            "' are resharded: their full values are not in memory. Use them inside the module's "
            "forward, or call unshard() first"));
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    const auto& part = parts_[i];
    const auto& geometry = param.geometry();
    auto sharded = shaped(
        typed_view(shard_, part.shard_offset, part.numel, param.dtype()), geometry.shard_sizes);
    auto unsharded = alone() ? sharded
                             : shaped(
                                   typed_view(
                                       unsharded_->tensor(), part.unsharded_offset,
                                       part.numel * group_.size(), param.dtype()),
                                   geometry.sizes);
    param.attach(std::move(sharded), std::move(unsharded));
  }
  if (!unsharded_) {
    return;
  }
  for (const auto i : order_) {
    const auto& part = parts_[i];
    const auto run =
        unsharded_->tensor().narrow(0, part.unsharded_offset, part.numel * group_.size());
    gather_targets_.push_back(
        params_[i].geometry().dim == 0 ? run.view({group_.size(), part.numel}) : at::Tensor());
  }
  unsharded_->free();
}

// ------------------------------------------------------------ Runtime

void FSDPParamGroup::unshard() {
  if (pending_ || is_unsharded()) {
    return;
  }
  for (const auto& param : params_) {
    param.check_not_replaced();
  }
  if (alone()) {
    return;
  }
  pending_ = start_gather(shard_, group_);
}

void FSDPParamGroup::wait_for_unshard() {
  if (pending_) {
    pending_->work.wait();
    unsharded_->allocate();
    copy_out_all();
    pending_.reset();
    show(Face::Unsharded);
  } else if (alone()) {
    show(Face::Unsharded);
  }
}

void FSDPParamGroup::copy_out_all() {
  at::NoGradGuard no_grad;
  auto targets = gather_targets_;
  for (size_t k = 0; k < order_.size(); ++k) {
    if (!targets[k].defined()) {
      // A shard of another dim than 0 is no run of the whole: by way of a copy.
      targets[k] = at::empty({group_.size(), parts_[order_[k]].numel}, shard_.options());
    }
  }
  copy_out(*pending_, *layout_, targets);
  for (size_t k = 0; k < order_.size(); ++k) {
    auto& param = params_[order_[k]];
    const auto& geometry = param.geometry();
    if (geometry.dim != 0) {
      auto pieces = typed_view(targets[k].view(-1), 0, targets[k].numel(), param.dtype())
                        .view({group_.size(), geometry.padded_numel})
                        .unbind(0);
      for (auto& piece : pieces) {
        piece = piece.view(geometry.shard_sizes); // even, so every rank's are the same
      }
      auto whole = param.unsharded().detach();
      at::cat_out(whole, pieces, geometry.dim);
    }
  }
}

void FSDPParamGroup::reshard() {
  show(Face::Sharded);
  if (unsharded_ && unsharded_->allocated()) {
    unsharded_->free();
  }
}

void FSDPParamGroup::show(Face face) {
  if (face == shown_) {
    return;
  }
  for (auto& param : params_) {
    param.show(face);
  }
  shown_ = face;
}

bool FSDPParamGroup::has_unsharded_grads() const {
  return std::any_of(params_.begin(), params_.end(), [](const auto& param) {
    return param.unsharded_grad().defined();
  });
}

void FSDPParamGroup::drop_pending() {
  if (pending_) {
    pending_->work.wait(); // its buffer is still being written
    pending_.reset();
  }
}

void FSDPParamGroup::reset() {
  pending_.reset(); // not waited for: the peers may be gone
  reshard();
  for (auto& param : params_) {
    param.take_unsharded_grad();
  }
}

void FSDPParamGroup::reduce_grads() {
  std::vector<at::ScalarType> dtypes;
  for (const auto& param : params_) {
    if (param.unsharded_grad().defined() &&
        std::find(dtypes.begin(), dtypes.end(), param.dtype()) == dtypes.end()) {
      dtypes.push_back(param.dtype());
    }
  }
  reshard();
  for (const auto dtype : dtypes) {
    reduce_grads_of(dtype);
  }
}

void FSDPParamGroup::reduce_grads_of(at::ScalarType dtype) {
  at::NoGradGuard no_grad;
  std::vector<FSDPParam*> reduced;
  std::vector<ReduceInput> inputs;
  for (auto& param : params_) {
    if (param.dtype() == dtype && param.unsharded_grad().defined()) {
      reduced.push_back(&param);
      inputs.push_back({param.take_unsharded_grad(), param.geometry().dim});
    }
  }
  const auto reduce_dtype = reduce_dtype_for(inputs.front().grad);
  if (alone()) {
    for (size_t i = 0; i < reduced.size(); ++i) {
      auto grad = inputs[i].grad.to(reduce_dtype);
      if (gradient_divide_factor) {
        grad.div_(*gradient_divide_factor);
      }
      reduced[i]->add_sharded_grad(grad.to(dtype));
    }
    return;
  }
  const ReduceRequest request{
      .group = group_,
      .reduce_dtype = reduce_dtype,
      .result_dtype = dtype,
      .factors = divide_factors(
          {.reduce_dtype = reduce_dtype,
           .shard_size = group_.size(),
           .factor = gradient_divide_factor,
           .force_sum = force_sum_reduction})};
  auto reducing = start_reduce(inputs, request);
  const auto flat = finish_reduce(reducing, request);
  int64_t offset = 0;
  for (auto* param : reduced) {
    const auto& geometry = param->geometry();
    param->add_sharded_grad(
        shaped(flat.narrow(0, offset, geometry.padded_numel), geometry.shard_sizes));
    offset += geometry.padded_numel;
  }
}

} // namespace fsdp::detail
