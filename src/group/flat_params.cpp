// How a group's parameters lie in memory.
#include "group/flat_params.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/hash.h"
#include "base/text.h"
#include "group/flat_views.h"
#include "group/group_number.h"
#include "param/param_placement.h"

namespace fsdp::detail {

namespace {

uint64_t add_sizes(uint64_t hash, const FSDPParam& param) {
  for (const auto size : param.geometry().sizes) {
    hash = add_to_hash(hash, static_cast<uint64_t>(size));
  }
  hash = add_to_hash(hash, static_cast<uint64_t>(param.geometry().dim));
  return add_to_hash(hash, static_cast<uint64_t>(param.geometry().merged_dims));
}

ShardGeometry geometry_of(
    const ParamSpec& spec, const std::vector<int64_t>& sizes, const ProcessGroup& ranks) {
  return shard_geometry(
      spec.name, sizes, spec.shard_dim, ranks.size(), ranks.rank(), spec.merged_dims);
}

} // namespace

void check_shardable(const ParamSpec& spec, const DataParallelMesh& mesh) {
  const auto piece = TensorPiece::find(spec.param);
  const auto& group = mesh.shard_group;
  try {
    // Checks the pieces of all ranks, so that every rank refuses what one of them cannot shard.
    std::vector<std::vector<int64_t>> pieces{spec.param.sizes().vec()};
    if (piece) {
      pieces = piece->piece_sizes();
    }
    for (const auto& sizes : pieces) {
      (void)geometry_of(spec, sizes, group);
    }
    const auto sizes = spec.param.sizes().vec();
    (void)data_parallel_placement(
        mesh, geometry_of(spec, sizes, group).placement(), sizes, piece.get());
  } catch (c10::Error& error) {
    error.add_context(c10::str(
        "parameter '", spec.name, "', over ", (mesh.parent ? mesh.parent->mesh : mesh.mesh).str()));
    throw;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      spec.opaque || spec.param.is_contiguous(),
      "[fully_shard] does not support non-contiguous parameters: '", spec.name, "' has sizes ",
      spec.param.sizes(), " and strides ", spec.param.strides(), "; call contiguous() on it first");
}

FlatParams::FlatParams(
    const std::vector<ParamSpec>& specs,
    const DataParallelMesh& mesh,
    const std::string& owner,
    std::optional<at::ScalarType> param_dtype,
    const AnyOffloadPolicy& offload)
    : ranks_(mesh.shard_group),
      param_dtype_(param_dtype),
      offload_(
          std::holds_alternative<CPUOffloadPolicy>(offload)
              ? std::optional(std::get<CPUOffloadPolicy>(offload))
              : std::nullopt),
      compute_device_(current_device(mesh.mesh.device_type())),
      owner_(owner) {
  TORCH_CHECK_VALUE(
      !specs.empty(), "[fully_shard] the group of ", module_text(owner_), " has no parameters");
  for (const auto& spec : specs) {
    check_shardable(spec, mesh);
    params_.push_back(std::make_unique<FSDPParam>(
        spec.param, spec.name, mesh, geometry_of(spec, spec.param.sizes().vec(), ranks_),
        spec.opaque));
  }
  auto kind = kEmptyHash;
  for (const auto& param : params_) {
    kind = add_sizes(kind, *param);
  }
  number_ = next_group_number(ranks_, kind);
  build();
}

FlatParams::~FlatParams() {
  try {
    abandon_whole();
  } catch (const std::exception&) { // the device is lost, or the process ends
  }
}

/// Gives up the memory of the whole parameters: it is freed with its last view, which a graph may
/// hold. First, the stream that allocated it waits for all uses so far.
void FlatParams::abandon_whole() {
  if (const auto stream = std::exchange(whole_stream_, std::nullopt)) {
    wait_for_stream(stream, current_stream(stream->device()));
  }
}

void FlatParams::set_owner(const std::string& owner, int64_t model) {
  owner_ = owner;
  model_ = model;
  purposes_.clear();
  purpose_.reset();
  if (whole_) {
    whole_->set_owner(owner);
  }
}

const CollectiveLabel::Purpose& FlatParams::purpose() const {
  if (!purpose_) {
    std::vector<FSDPParam*> all;
    for (const auto& param : params_) {
      all.push_back(param.get());
    }
    purpose_ = make_purpose(all);
  }
  return purpose_;
}

const CollectiveLabel::Purpose& FlatParams::purpose(const std::vector<FSDPParam*>& params) const {
  if (params.size() == params_.size()) {
    return purpose();
  }
  constexpr size_t kMost = 64; // the sets of used parameters may change from step to step
  if (purposes_.size() > kMost) {
    purposes_.clear();
  }
  auto& found = purposes_[params];
  if (!found) {
    found = make_purpose(params);
  }
  return found;
}

CollectiveLabel::Purpose FlatParams::make_purpose(const std::vector<FSDPParam*>& params) const {
  auto hash = add_to_hash(add_to_hash(kEmptyHash, owner_), static_cast<uint64_t>(model_));
  std::vector<std::string> names;
  for (const auto* param : params) {
    names.push_back(param->name());
    hash = add_sizes(add_to_hash(hash, param->name()), *param);
  }
  auto text = "of " + module_text(owner_);
  if (model_ > 0) {
    text += c10::str(" of model ", model_ + 1, " of its kind");
  }
  if (params.size() < params_.size()) {
    text += c10::str(", for its parameters ", join(names), " alone");
  }
  return std::make_shared<CollectivePurpose>(CollectivePurpose{std::move(text), hash});
}

bool FlatParams::take_replacements() {
  if (shown_ == Face::Sharded) {
    const auto held = params_.front()->user().begin();
    for (const auto& param : params_) {
      param->take_replacement();
    }
  }
  return was_changed();
}

void FlatParams::build() {
  std::vector<LayoutItem> items;
  extended_.clear();
  for (const auto& param : params_) {
    param->take_replacement();
    (void)param->shard_values(); // throws before anything is changed
    TORCH_CHECK_VALUE(
        param->tensor().device() == params_.front()->tensor().device(), "[fully_shard] group '",
        owner_, "' has parameters on two devices: '", params_.front()->name(), "' on ",
        params_.front()->tensor().device(), ", '", param->name(), "' on ",
        param->tensor().device());
    extended_.push_back(param->is_extended());
    items.push_back(
        {.dtype = param->dtype(),
         .gather_dtype = gather_dtype(*param),
         .padded_numel = param->is_opaque() ? 0 : param->geometry().padded_numel,
         .extended = extended_.back()});
  }
  layout_ = flat_layout(items, ranks_.size());
  attach_params();
}

at::ScalarType FlatParams::gather_dtype(const FSDPParam& param) const {
  return param_dtype_ && at::isFloatingType(param.dtype()) ? *param_dtype_ : param.dtype();
}

void FlatParams::attach_params() {
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
  // The padding is zero, so that it is the same on every rank and in every run.
  const auto shard = at::zeros({layout_.shard_numel}, options);
  abandon_whole();
  whole_.reset();
  divided_ = at::Tensor();
  if (!alone() || !layout_.sends_shards() || options.device() != gathered_options.device()) {
    whole_.emplace(layout_.unsharded_numel, gathered_options, owner_);
  }
  gather_targets_.assign(params_.size(), {});
  gather_numels_.clear();
  for (size_t k = 0; k < params_.size(); ++k) {
    attach_param(k, shard);
  }
  shard_ = shard; // the old one held the values until here
  earlier_writes_ += guard_ ? guard_->num_writes() : 0;
  guard_ = std::make_unique<GuardedShards>(
      shard_, [this](int64_t offset) -> const FSDPParam& { return param_at(offset); });
  if (whole_) {
    whole_->free();
  }
  plan_ = gather_plan();
  backend_places_ = plan_ && places_gathers(ranks_, *plan_, gathered_options);
  if (has_streams(device()) && !backend_places_) {
    plan_.reset(); // one operator copies out instead
  }
}

/// Gives the parameter at position `k` of the layout its views of the buffers.
void FlatParams::attach_param(size_t k, const at::Tensor& shard) {
  auto& param = *params_[layout_.order[k]];
  const auto& part = layout_.parts[layout_.order[k]];
  const auto& geometry = param.geometry();
  if (param.is_opaque()) {
    const auto& like = whole_->tensor();
    param.attach(
        stand_in(geometry.shard_sizes, shard.options().dtype(param.dtype())),
        stand_in(geometry.sizes, like.options().dtype(gather_dtype(param))));
    return;
  }
  const auto sharded = shaped(
      typed_view(shard, part.shard.offset, part.shard.numel, param.dtype()), geometry.shard_sizes);
  auto unsharded = geometry.merged_dims > 1 && !whole_ ? sharded.view(geometry.sizes) : sharded;
  if (whole_) {
    const auto numel = part.gathered.numel * ranks_.size();
    unsharded = shaped(
        typed_view(whole_->tensor(), part.unsharded_offset, numel, gather_dtype(param)),
        geometry.sizes);
    if (geometry.dim == 0) {
      gather_targets_[k] = whole_->tensor()
                               .narrow(0, part.unsharded_offset, numel)
                               .view({ranks_.size(), part.gathered.numel});
    }
  }
  if (k < layout_.num_plain) {
    gather_numels_.push_back(part.gathered.numel);
  }
  param.attach(sharded, unsharded);
}

std::shared_ptr<const GatherPlan> FlatParams::gather_plan() const {
  const bool by_rows = std::all_of(
      params_.begin(), params_.end(), [](const auto& param) { return param->geometry().dim == 0; });
  // An offloaded shard is copied directly into this rank's part of an ordinary gather's output. A
  // placed gather would need a second buffer on the device.
  const bool from_host = offload_ && has_streams(device());
  if (alone() || from_host || !layout_.all_plain() || !by_rows) {
    return nullptr;
  }
  GatherPlan plan{
      .parts = {},
      .ranks = ranks_.size(),
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
         .unpadded_numel =
             c10::multiply_integers(params_[i]->geometry().sizes) * static_cast<int64_t>(units)});
  }
  return std::make_shared<GatherPlan>(std::move(plan));
}

bool FlatParams::was_changed() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i]->was_replaced() || extended_[i] != params_[i]->is_extended()) {
      return true;
    }
  }
  return false;
}

void FlatParams::check_trainable() const {
  if (offload_) {
    check_on_host();
  }
  std::vector<std::string> on_meta;
  for (const auto& param : params_) {
    if (param->tensor().is_meta()) {
      on_meta.push_back("'" + param->name() + "'");
    }
  }
  TORCH_CHECK(
      on_meta.empty(),
      "[fully_shard] FSDP parameters should be materialized from meta device before training, but "
      "the following were still on meta device: [",
      join(on_meta), "]; give them memory (to_empty) and values first");
  const auto device = params_.front()->tensor().device();
  TORCH_CHECK_VALUE(
      offload_ || device.type() == compute_device_.type(), "[fully_shard] parameter '",
      params_.front()->name(), "' is on ", device, ", but the mesh is of ",
      c10::DeviceTypeName(compute_device_.type(), /*lower_case=*/true),
      "; move the module there, or shard it over a mesh of its device");
}

/// Throws if an offloaded shard has left the host.
void FlatParams::check_on_host() const {
  std::vector<std::string> elsewhere;
  for (const auto& param : params_) {
    const auto device = param->face() == Face::Sharded ? param->tensor().device() : at::kCPU;
    if (!device.is_cpu() && !device.is_meta()) { // in Python's words
      elsewhere.push_back(c10::str(
          "('", param->name(), "', device(type='", c10::DeviceTypeName(device.type(), true),
          "', index=", static_cast<int>(device.index()), "))"));
    }
  }
  TORCH_CHECK(
      elsewhere.empty(),
      "[fully_shard] FSDP parameters should be materialized on CPU when enabling CPU offloading; "
      "keep the module on the CPU after fully_shard: load a state dict whose tensors are on the "
      "CPU, or call to_empty for the CPU. Found following parameters on non-CPU device: [",
      join(elsewhere), "]");
}

/// The parameter whose shard is at that offset of the shard buffer, in bytes, or before it if
/// padding is there.
const FSDPParam& FlatParams::param_at(int64_t offset) const {
  const auto unit = static_cast<int64_t>(shard_.element_size());
  size_t found = 0;
  int64_t last = -1;
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto from = layout_.parts[i].shard.offset;
    if (from * unit <= offset && from >= last) {
      found = i;
      last = from;
    }
  }
  return *params_[found];
}

uint64_t FlatParams::shard_version() const {
  uint64_t sum = earlier_writes_ + guard_->num_writes();
  for (const auto& param : params_) {
    sum += param->shard_version();
  }
  return sum;
}

ShardingPlan::Group FlatParams::plan() const {
  ShardingPlan::Group plan;
  plan.num_params = static_cast<int64_t>(params_.size());
  plan.shard_bytes = static_cast<int64_t>(shard_.nbytes());
  plan.on_host = home().is_cpu() && has_streams(compute_device_);
  for (const auto& param : params_) {
    const auto size = static_cast<int64_t>(c10::elementSize(gather_dtype(*param)));
    const auto numel = c10::multiply_integers(param->geometry().sizes);
    const auto padded_numel = param->geometry().gathered_numel();
    if (param->is_opaque()) {
      plan.shard_bytes +=
          param->geometry().padded_numel * static_cast<int64_t>(c10::elementSize(param->dtype()));
    }
    plan.numel += numel;
    plan.gathered_bytes += padded_numel * size;
    plan.padding_bytes += (padded_numel - numel) * size;
  }
  return plan;
}

std::string FlatParams::describe() const {
  std::set<std::string> dtypes;
  for (const auto& param : params_) {
    dtypes.insert(c10::toString(param->dtype()));
  }
  const auto sizes = plan();
  return c10::str(
      "params=", sizes.num_params, " numel=", sizes.numel, " dtype=", join(dtypes, "+"),
      " param_dtype=", param_dtype_ ? c10::toString(*param_dtype_) : "same",
      " shard_bytes=", sizes.shard_bytes, " gathered_bytes=", sizes.gathered_bytes,
      " padding_bytes=", sizes.padding_bytes, " offload=", offload_ ? "cpu" : "no");
}

FlatParams::Freed FlatParams::free_whole() {
  for (size_t k = layout_.num_plain; k < params_.size(); ++k) {
    params_[layout_.order[k]]->free_leaf();
  }
  if (!whole_ || !whole_->allocated()) {
    return {};
  }
  auto memory = whole_->free();
  return {std::move(memory), std::exchange(whole_stream_, std::nullopt)};
}

void FlatParams::wait_for_host_copies() {
  std::exchange(copied_in_, {}).synchronize();
}

void FlatParams::show(Face face) {
  if (face != shown_) {
    for (const auto& param : params_) {
      param->show(face);
    }
    shown_ = face;
  }
  show_to_users(face);
}

void FlatParams::show_to_users(Face face) {
  if (face == shown_to_users_) {
    return;
  }
  const auto held = params_.front()->user().begin();
  for (const auto& param : params_) {
    param->show_to_user(face);
  }
  shown_to_users_ = face;
}

void FlatParams::refuse_write(const FSDPParam& param) {
  told_of_write_ = true;
  TORCH_CHECK(
      false, "[fully_shard] parameter '", param.name(),
      "' was written to while it was unsharded, which would be lost. Write to its shard: call "
      "reshard() first. If this was a step of an optimizer, a forward without a backward came "
      "before it: run that one without gradients (NoGradGuard, torch.no_grad)");
}

void FlatParams::check_whole_unwritten() {
  if (shown_ == Face::Sharded || !whole_) {
    return;
  }
  const FSDPParam* written = nullptr;
  for (const auto& param : params_) {
    written = param->check_and_clear_unsharded_edit() ? param.get() : written;
  }
  if (written) {
    refuse_write(*written);
  }
}

void FlatParams::check_whole_values(bool only_steps) {
  if (!whole_ || told_of_write_) {
    return;
  }
  for (const auto& param : params_) {
    const auto& geometry = param->geometry();
    const bool is_exact = !param->extension && at::isFloatingType(param->dtype());
    if (is_exact && (!only_steps || at::is_expandable_to(geometry.shard_sizes, geometry.sizes))) {
      const auto whole = param->unsharded().detach();
      if (!at::allclose(
              param->part_of(whole), param->sharded().to(whole.options()), /*rtol=*/0, /*atol=*/0,
              /*equal_nan=*/true)) {
        refuse_write(*param);
      }
    }
  }
}

void FlatParams::visit_memory(const MemoryVisitor& visit) const {
  visit(&MemoryStats::shards, shard_);
  if (whole_ && whole_->allocated()) {
    visit(&MemoryStats::gathered, whole_->tensor());
  }
  visit(&MemoryStats::gathered, divided_);
  for (const auto& param : params_) {
    visit(&MemoryStats::shards, param->tensor()); // put there by somebody, and not adopted yet
    const auto& user = param->user();
    visit(&MemoryStats::gradients, user.local(param->unsharded_grad()));
    visit(&MemoryStats::gradients, param->partial_grad);
    visit(&MemoryStats::gradients, user.local(user.tensor().grad()));
  }
}

} // namespace fsdp::detail
