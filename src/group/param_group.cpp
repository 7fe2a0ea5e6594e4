#include "group/param_group.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "base/text.h"
#include "group/flat_views.h"
#include "param/param_placement.h"
#include "param/unfilled.h"
#include "process_group/observer.h"
#include "runtime/log.h"

namespace fsdp::detail {

// ------------------------------------------------------------ Initialization

void check_shardable(const ParamSpec& spec, const DataParallelMesh& mesh) {
  const auto spread = Spread::find(spec.param);
  const auto& group = mesh.shard_group;
  try {
    // The pieces of the others too, so that all ranks refuse what one cannot do.
    std::vector<std::vector<int64_t>> pieces{spec.param.sizes().vec()};
    if (spread) {
      pieces = spread->piece_sizes();
    }
    for (const auto& sizes : pieces) {
      (void)shard_geometry(spec.name, sizes, spec.shard_dim, group.size(), group.rank());
    }
    (void)placed_over(mesh, spec.shard_dim, spec.param.sizes().vec(), spread.get());
  } catch (c10::Error& error) {
    error.add_context(c10::str(
        "parameter '", spec.name, "', over ", (mesh.whole ? mesh.whole->mesh : mesh.mesh).str()));
    throw;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      spec.param.is_contiguous(), "[fully_shard] does not support non-contiguous parameters: '",
      spec.name, "' has sizes ", spec.param.sizes(), " and strides ", spec.param.strides(),
      "; call contiguous() on it first");
}

FSDPParamGroup::FSDPParamGroup(
    const std::vector<ParamSpec>& params,
    const DataParallelMesh& mesh,
    std::string name,
    const GroupPolicy& policy)
    : name_(std::move(name)),
      mesh_(mesh),
      group_(mesh.shard_group),
      replicate_group_(mesh.replicate_group),
      reduce_group_(group_),
      post_forward_ranks_(group_.size()),
      param_dtype_(policy.precision.param_dtype),
      offload_(
          std::holds_alternative<CPUOffloadPolicy>(policy.offload)
              ? std::optional(std::get<CPUOffloadPolicy>(policy.offload))
              : std::nullopt),
      compute_device_(current_device(mesh.mesh.device_type())),
      from_first_replica_(policy.from_first_replica && replicate_group_) {
  TORCH_CHECK_VALUE(!params.empty(), "[fully_shard] group '", name_, "' has no parameters");
  if (policy.precision.reduce_dtype != param_dtype_) { // else gradients are computed in it
    reduce_dtype = policy.precision.reduce_dtype;
  }
  for (const auto& spec : params) {
    check_shardable(spec, mesh);
    params_.push_back(std::make_unique<FSDPParam>(
        spec.param, spec.name, mesh,
        shard_geometry(
            spec.name, spec.param.sizes().vec(), spec.shard_dim, group_.size(), group_.rank())));
  }
  build();
}

FSDPParamGroup::~FSDPParamGroup() {
  try {
    abandon_unsharded();
  } catch (const std::exception&) { // the device is lost, or the process ends
  }
}

/// The memory goes with the last view of it, a graph's perhaps: what has used it so
/// far comes before whatever its stream is given next.
void FSDPParamGroup::abandon_unsharded() {
  if (const auto stream = std::exchange(unsharded_stream_, std::nullopt)) {
    wait_for_stream(stream, current_stream(stream->device()));
  }
}

void FSDPParamGroup::set_name(const std::string& name, bool one_of_several) {
  name_ = name;
  label_ = name.empty() ? "" : " (" + name + ")";
  if (one_of_several) {
    label_ += c10::str(" [pg=", group_.size(), "]");
  }
  if (unsharded_) {
    unsharded_->set_owner(name_);
  }
}

/// Makes the buffers for what the parameters hold now, and moves it there.
void FSDPParamGroup::build() {
  std::vector<LayoutItem> items;
  extended_.clear();
  for (const auto& param : params_) {
    (void)param->shard_values(); // throws before anything is changed
    TORCH_CHECK_VALUE(
        param->tensor().device() == params_.front()->tensor().device(), "[fully_shard] group '",
        name_, "' has parameters on two devices: '", params_.front()->name(), "' on ",
        params_.front()->tensor().device(), ", '", param->name(), "' on ",
        param->tensor().device());
    extended_.push_back(param->extension != nullptr);
    items.push_back(
        {.dtype = param->dtype(),
         .gather_dtype = gather_dtype(*param),
         .padded_numel = param->geometry().padded_numel,
         .extended = extended_.back()});
  }
  layout_ = flat_layout(items, group_.size());
  attach_params();
  sharded_state_ = ShardedState::Sharded;
  comm->gather_after(StreamEvent::of(optional_current_stream(device())));
}

at::ScalarType FSDPParamGroup::gather_dtype(const FSDPParam& param) const {
  return param_dtype_ && at::isFloatingType(param.dtype()) ? *param_dtype_ : param.dtype();
}

void FSDPParamGroup::attach_params() {
  at::NoGradGuard no_grad;
  c10::InferenceMode not_inference(false);
  const auto from = params_.front()->tensor().device();
  auto options = at::TensorOptions().device(from).dtype(layout_.shard_dtype);
  auto gathered_options = options.dtype(layout_.gather_dtype);
  if (offload_ && !from.is_meta()) {
    gathered_options = gathered_options.device(compute_device_);
    options = options.device(at::kCPU).pinned_memory(
        offload_->pin_memory && has_streams(compute_device_));
  }
  // Zeros, so that padding is the same on every rank and in every run.
  const auto shard = at::zeros({layout_.shard_numel}, options);
  abandon_unsharded();
  unsharded_.reset();
  if (!alone() || !layout_.sends_shards() || options.device() != gathered_options.device()) {
    unsharded_.emplace(layout_.unsharded_numel, gathered_options, name_);
  }
  gather_targets_.assign(params_.size(), {});
  gather_numels_.clear();
  for (size_t k = 0; k < params_.size(); ++k) {
    auto& param = *params_[layout_.order[k]];
    const auto& part = layout_.parts[layout_.order[k]];
    const auto& geometry = param.geometry();
    auto sharded = shaped(
        typed_view(shard, part.shard.offset, part.shard.numel, param.dtype()),
        geometry.shard_sizes);
    auto unsharded = sharded;
    if (unsharded_) {
      const auto numel = part.gathered.numel * group_.size();
      unsharded = shaped(
          typed_view(unsharded_->tensor(), part.unsharded_offset, numel, gather_dtype(param)),
          geometry.sizes);
      if (geometry.dim == 0) {
        gather_targets_[k] = unsharded_->tensor()
                                 .narrow(0, part.unsharded_offset, numel)
                                 .view({group_.size(), part.gathered.numel});
      }
    }
    if (k < layout_.num_plain) {
      gather_numels_.push_back(part.gathered.numel);
    }
    param.attach(std::move(sharded), std::move(unsharded));
  }
  shard_ = shard; // the old one held the values until here
  if (unsharded_) {
    unsharded_->free();
  }
  plan_ = gather_plan();
  places_ = plan_ && places_gathers(group_, *plan_, gathered_options);
  if (has_streams(device()) && !places_) {
    plan_.reset(); // one operator copies out
  }
}

/// Replicas that begin with other values would stay different, silently. Once, in the first
/// forward: before it some ranks may have none yet. Without any the forward refuses.
void FSDPParamGroup::take_first_replica() {
  if (std::any_of(params_.begin(), params_.end(), [](const auto& param) {
        return is_unfilled(param->tensor());
      })) {
    return;
  }
  from_first_replica_ = false;
  at::NoGradGuard no_grad;
  const CollectiveLabel collective(name_);
  const auto values = shard_.to(compute_device_); // offloaded: to where ranks communicate
  replicate_group_->broadcast(values, /*root=*/0);
  if (!values.is_same(shard_)) {
    shard_.copy_(values);
  }
  comm->gather_after(StreamEvent::of(optional_current_stream(device())));
}

std::shared_ptr<const GatherPlan> FSDPParamGroup::gather_plan() const {
  const bool by_rows = std::all_of(
      params_.begin(), params_.end(), [](const auto& param) { return param->geometry().dim == 0; });
  // From the host a shard is copied into its place in what an ordinary gather
  // writes to; for another one it would lie beside that on the device.
  const bool from_host = offload_ && has_streams(device());
  if (alone() || from_host || !layout_.all_plain() || !by_rows) {
    return nullptr;
  }
  GatherPlan plan{
      .parts = {},
      .ranks = group_.size(),
      .in_numel = layout_.gathered_numel,
      .out_numel = layout_.unsharded_numel};
  for (const auto i : layout_.order) {
    const auto& part = layout_.parts[i];
    const auto units =
        c10::elementSize(gather_dtype(*params_[i])) / c10::elementSize(layout_.gather_dtype);
    plan.parts.push_back(
        {.in = part.gathered.offset,
         .out = part.unsharded_offset,
         .numel = part.gathered.numel,
         .whole =
             c10::multiply_integers(params_[i]->geometry().sizes) * static_cast<int64_t>(units)});
  }
  return std::make_shared<GatherPlan>(std::move(plan));
}

bool FSDPParamGroup::was_changed() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i]->was_replaced() || extended_[i] != (params_[i]->extension != nullptr)) {
      return true;
    }
  }
  return false;
}

void FSDPParamGroup::lazy_init() {
  if (offload_) {
    check_host_memory();
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
      join(on_meta), "; give them memory (fsdp::to_empty) and values first");
  const auto device = params_.front()->tensor().device();
  TORCH_CHECK_VALUE(
      offload_ || device.type() == compute_device_.type(), "[fully_shard] parameter '",
      params_.front()->name(), "' is on ", device, ", but the mesh is of ",
      c10::DeviceTypeName(compute_device_.type(), /*lower_case=*/true),
      "; move the module there, or shard it over a mesh of its device");
  if (was_changed()) {
    to_sharded(); // adopts
  }
  if (from_first_replica_) {
    take_first_replica();
  }
}

void FSDPParamGroup::check_host_memory() const {
  std::vector<std::string> elsewhere;
  for (const auto& param : params_) {
    const auto device = param->face() == Face::Sharded ? param->tensor().device() : at::kCPU;
    if (!device.is_cpu() && !device.is_meta()) {
      elsewhere.push_back(c10::str(param->name(), " (", device, ")"));
    }
  }
  TORCH_CHECK(
      elsewhere.empty(),
      "[fully_shard] parameters should be materialized on CPU when enabling CPU offloading, but "
      "these were moved elsewhere: ",
      join(elsewhere), "; do not move the module after fully_shard, or to_empty it on the CPU");
}

void FSDPParamGroup::log_layout() const {
  if (group_.rank() != 0) {
    return; // the others' is the same
  }
  int64_t numel = 0;
  int64_t bytes = 0; // of the whole parameters
  int64_t padded_bytes = 0;
  std::set<std::string> dtypes;
  for (const auto& param : params_) {
    const auto size = static_cast<int64_t>(c10::elementSize(gather_dtype(*param)));
    const auto whole = c10::multiply_integers(param->geometry().sizes);
    numel += whole;
    bytes += whole * size;
    padded_bytes += param->geometry().gathered_numel() * size;
    dtypes.insert(c10::toString(param->dtype()));
  }
  const auto name_of = [](const auto& dtype) { return dtype ? c10::toString(*dtype) : "same"; };
  log(LogLevel::Info,
      c10::str(
          "group=\"", name_, "\" ranks=", group_.size(), " params=", params_.size(),
          " numel=", numel, " dtype=", join(dtypes, "+"), " param_dtype=", name_of(param_dtype_),
          " reduce_dtype=", name_of(reduce_dtype), " shard_bytes=", shard_.nbytes(),
          " gathered_bytes=", padded_bytes, " padding_bytes=", padded_bytes - bytes,
          " reshard_after_forward=", post_forward_ranks_, " offload=", offload_ ? "cpu" : "no"));
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

void FSDPParamGroup::set_all_reduce_hook(
    std::function<void(at::Tensor&)> hook, OptionalStream stream) {
  TORCH_CHECK_VALUE(!stream || !replicate_group_, "stream cannot be set when using native HSDP");
  all_reduce_hook_ = std::move(hook);
  all_reduce_hook_stream_ = stream;
}

void FSDPParamGroup::set_separate_reduce_scatter_group(bool enable) {
  std::vector<int> all(group_.size());
  std::iota(all.begin(), all.end(), 0);
  reduce_group_ = enable && !alone() ? group_.new_group(all, "fsdp_reduce_scatter") : group_;
}

} // namespace fsdp::detail
