#include "group/param_group.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/text.h"
#include "group/flat_views.h"

namespace fsdp::detail {

namespace {

// Unsharded parameters begin at multiples of this, as if allocated one by one.
constexpr int64_t kAlignment = 256;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

} // namespace

// ------------------------------------------------------------ Initialization

void check_shardable(const ParamSpec& spec, const DeviceMesh& mesh) {
  const auto group = mesh.get_group();
  (void)shard_geometry(
      spec.name, spec.param.sizes().vec(), spec.shard_dim, group.size(), group.rank());
  TORCH_CHECK_NOT_IMPLEMENTED(
      spec.param.is_contiguous(), "[fully_shard] does not support non-contiguous parameters: '",
      spec.name, "' has sizes ", spec.param.sizes(), " and strides ", spec.param.strides(),
      "; call contiguous() on it first");
}

FSDPParamGroup::FSDPParamGroup(
    const std::vector<ParamSpec>& params, const DeviceMesh& mesh, std::string name)
    : name_(std::move(name)),
      mesh_(mesh),
      group_(mesh.get_group()),
      reduce_group_(group_),
      post_forward_ranks_(group_.size()) {
  TORCH_CHECK_VALUE(!params.empty(), "[fully_shard] group '", name_, "' has no parameters");
  for (const auto& spec : params) {
    check_shardable(spec, mesh);
    params_.push_back(std::make_unique<FSDPParam>(
        spec.param, spec.name, mesh,
        shard_geometry(
            spec.name, spec.param.sizes().vec(), spec.shard_dim, group_.size(), group_.rank())));
  }
  build();
}

void FSDPParamGroup::set_name(const std::string& name) {
  name_ = name;
  if (unsharded_) {
    unsharded_->set_owner(name_);
  }
}

/// Makes the buffers for what the parameters hold now, and moves it there.
void FSDPParamGroup::build() {
  for (const auto& param : params_) {
    (void)param->shard_values(); // throws before anything is changed
    TORCH_CHECK_VALUE(
        param->tensor().device() == params_.front()->tensor().device(), "[fully_shard] group '",
        name_, "' has parameters on two devices: '", params_.front()->name(), "' on ",
        params_.front()->tensor().device(), ", '", param->name(), "' on ",
        param->tensor().device());
  }
  lay_out();
  attach_params(params_.front()->tensor().options().requires_grad(false).dtype(gather_dtype_));
  sharded_state_ = ShardedState::Sharded;
  comm->gather_after(StreamEvent::of(optional_current_stream(device())));
}

void FSDPParamGroup::lay_out() {
  const auto first = params_.front()->dtype();
  const bool plain_bytes = std::all_of(params_.begin(), params_.end(), [&](const auto& param) {
    return param->dtype() == first && !param->extension;
  });
  gather_dtype_ = plain_bytes ? first : at::kByte;
  const auto unit = static_cast<int64_t>(c10::elementSize(gather_dtype_));
  order_.resize(params_.size());
  std::iota(order_.begin(), order_.end(), 0);
  // Extended ones last: the rest is sent as it lies. Wide elements first: then
  // every one is aligned without gaps.
  std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) {
    const auto key = [&](size_t i) {
      return std::pair(params_[i]->extension == nullptr, c10::elementSize(params_[i]->dtype()));
    };
    return key(a) > key(b);
  });
  num_plain_ = std::count_if(
      params_.begin(), params_.end(), [](const auto& param) { return !param->extension; });
  parts_.assign(params_.size(), {});
  gather_numels_.clear();
  int64_t shard_offset = 0;
  unsharded_numel_ = 0;
  for (size_t k = 0; k < order_.size(); ++k) {
    const auto& param = *params_[order_[k]];
    const auto size = static_cast<int64_t>(c10::elementSize(param.dtype()));
    auto& part = parts_[order_[k]];
    part.extended = param.extension != nullptr;
    part.numel = param.geometry().padded_numel * size / unit;
    shard_offset = round_up(shard_offset, std::max<int64_t>(size / unit, 1));
    part.shard_offset = shard_offset;
    part.unsharded_offset = unsharded_numel_;
    shard_offset += part.numel;
    unsharded_numel_ += round_up(part.numel * group_.size(), kAlignment / unit);
    if (k < num_plain_) {
      gather_numels_.push_back(part.numel);
      plain_numel_ = shard_offset;
    }
  }
  if (num_plain_ == 0) {
    plain_numel_ = 0;
  }
  // Divides over any number of neighbouring ranks.
  unsharded_numel_ = round_up(unsharded_numel_, group_.size());
}

void FSDPParamGroup::attach_params(const at::TensorOptions& options) {
  at::NoGradGuard no_grad;
  c10::InferenceMode not_inference(false);
  const auto& last = parts_[order_.back()];
  // Zeros, so that padding is the same on every rank and in every run.
  const auto shard = at::zeros({last.shard_offset + last.numel}, options);
  unsharded_.reset();
  if (!alone() || num_plain_ < params_.size()) {
    unsharded_.emplace(unsharded_numel_, options, name_);
  }
  gather_targets_.assign(params_.size(), {});
  for (size_t k = 0; k < order_.size(); ++k) {
    auto& param = *params_[order_[k]];
    const auto& part = parts_[order_[k]];
    const auto& geometry = param.geometry();
    auto sharded = shaped(
        typed_view(shard, part.shard_offset, part.numel, param.dtype()), geometry.shard_sizes);
    auto unsharded = sharded;
    if (unsharded_) {
      const auto run =
          unsharded_->tensor().narrow(0, part.unsharded_offset, part.numel * group_.size());
      unsharded = shaped(
          run.scalar_type() == param.dtype() ? run : run.view(param.dtype()), geometry.sizes);
      if (geometry.dim == 0) {
        gather_targets_[k] = run.view({group_.size(), part.numel});
      }
    }
    param.attach(std::move(sharded), std::move(unsharded));
  }
  shard_ = shard; // the old one held the values until here
  if (unsharded_) {
    unsharded_->free();
  }
}

bool FSDPParamGroup::was_changed() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i]->was_replaced() || parts_[i].extended != (params_[i]->extension != nullptr)) {
      return true;
    }
  }
  return false;
}

void FSDPParamGroup::lazy_init() {
  if (was_changed()) {
    to_sharded(); // adopts
  }
  std::vector<std::string> on_meta;
  for (const auto& param : params_) {
    if (param->tensor().is_meta()) {
      on_meta.push_back(param->name());
    }
  }
  TORCH_CHECK(
      on_meta.empty(),
      "[fully_shard] parameters should be materialized from meta device before training, but "
      "these were still on meta device: ",
      join(on_meta), "; give them memory (Module::to_empty) and values first");
}

uint64_t FSDPParamGroup::shard_version() const {
  uint64_t sum = 0;
  for (const auto& param : params_) {
    sum += param->shard_version();
  }
  return sum;
}

// ------------------------------------------------------------ Settings

void FSDPParamGroup::set_post_forward_ranks(int ranks) {
  post_forward_ranks_ = ranks;
  if (ranks > 0 && ranks < group_.size()) {
    std::vector<int> neighbours(ranks);
    std::iota(neighbours.begin(), neighbours.end(), group_.rank() / ranks * ranks);
    post_forward_group_ = group_.new_group(neighbours);
  }
}

void FSDPParamGroup::set_custom(std::shared_ptr<AllGather> comm_object) {
  all_gather_ = std::move(comm_object);
  custom_all_gather_ = true;
}

void FSDPParamGroup::set_custom(std::shared_ptr<ReduceScatter> comm_object) {
  reduce_scatter_ = std::move(comm_object);
  custom_reduce_scatter_ = true;
}

void FSDPParamGroup::allocate_from_process_group(bool enable) {
  TORCH_CHECK_VALUE(
      !custom_all_gather_ && !custom_reduce_scatter_,
      "[fully_shard] cannot call set_allocate_memory_from_process_group_for_comm() when the ",
      custom_all_gather_ ? "all-gather" : "reduce-scatter", " of group '", name_,
      "' is custom: give the custom one an allocate() of its own");
  all_gather_ = enable ? process_group_all_gather(group_) : default_all_gather();
  reduce_scatter_ = enable ? process_group_reduce_scatter(reduce_group_) : default_reduce_scatter();
}

void FSDPParamGroup::set_separate_reduce_scatter_group(bool enable) {
  std::vector<int> all(group_.size());
  std::iota(all.begin(), all.end(), 0);
  reduce_group_ = enable && !alone() ? group_.new_group(all, "fsdp_reduce_scatter") : group_;
}

} // namespace fsdp::detail
