#include "group/param_group.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/text.h"
#include "process_group/observer.h"

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
  return run.narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
}

} // namespace

// ------------------------------------------------------------ Initialization

FSDPParamGroup::FSDPParamGroup(
    const std::vector<ParamSpec>& params, const DeviceMesh& mesh, std::string name)
    : name_(std::move(name)),
      mesh_(mesh),
      group_(mesh.get_group()),
      reduce_group_(group_),
      post_forward_ranks_(group_.size()) {
  TORCH_CHECK_VALUE(!params.empty(), "[fully_shard] group '", name_, "' has no parameters");
  for (const auto& spec : params) {
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
    TORCH_CHECK_VALUE(
        param->tensor().device() == params_.front()->tensor().device(), "[fully_shard] group '",
        name_, "' has parameters on two devices: '", params_.front()->name(), "' on ",
        params_.front()->tensor().device(), ", '", param->name(), "' on ",
        param->tensor().device());
  }
  lay_out();
  attach_params(params_.front()->tensor().options().requires_grad(false).dtype(gather_dtype_));
  sharded_state_ = ShardedState::Sharded;
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
    part.numel = param.geometry().padded_numel * size / unit;
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

void FSDPParamGroup::lazy_init() {
  const bool changed = std::any_of(
      params_.begin(), params_.end(), [&](const auto& param) { return param->was_replaced(); });
  const auto num_plain = static_cast<size_t>(std::count_if(
      params_.begin(), params_.end(), [](const auto& param) { return !param->extension; }));
  if (changed || num_plain != num_plain_) {
    to_sharded();
    build();
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

// ------------------------------------------------------------ Gather

void FSDPParamGroup::unshard(bool async_op) {
  if (pending_ || (is_unsharded() && !maybe_outdated_)) {
    return;
  }
  EventLog::record(EventLog::Kind::Unshard, name_, training_state);
  if (!unshard_in_backward && training_state == TrainingState::PreBackward) {
    return;
  }
  const CollectiveLabel label(name_);
  const auto streams = comm->gather_streams(
      device(), !async_op && (training_state == TrainingState::Forward ||
                              training_state == TrainingState::PreBackward));
  if (sharded_state_ == ShardedState::ShardedPostForward &&
      training_state == TrainingState::PreBackward) {
    // Straight to where the parameters are; that memory was last used here.
    unsharded_->allocate();
    wait_for_stream(streams.all_gather, optional_current_stream(device()));
    pending_ = start_gather(
        *all_gather_, post_forward_shard_, post_forward_group_, streams, unsharded_->tensor());
    return;
  }
  lazy_init();
  post_forward_shard_ = at::Tensor(); // a forward wants the shards as they are now
  sharded_state_ = is_unsharded() ? sharded_state_ : ShardedState::Sharded;
  at::Tensor input;
  {
    const c10::OptionalStreamGuard on(streams.copy_in);
    input = gather_input();
  }
  if (alone()) {
    pending_ = Gathered{.input = input, .buffer = input};
  } else {
    pending_ = start_gather(*all_gather_, std::move(input), group_, streams);
  }
}

at::Tensor FSDPParamGroup::gather_input() {
  if (num_plain_ == params_.size()) {
    return shard_;
  }
  at::NoGradGuard no_grad;
  payloads_.clear();
  std::vector<at::Tensor> pieces{shard_.narrow(0, 0, plain_numel_)};
  for (size_t k = num_plain_; k < order_.size(); ++k) {
    auto& param = *params_[order_[k]];
    const auto& part = parts_[order_[k]];
    const auto& geometry = param.geometry();
    auto padded_sizes = geometry.sizes;
    padded_sizes[geometry.dim] = (geometry.sizes[geometry.dim] + group_.size() - 1) / group_.size();
    auto payload = param.extension->pre_all_gather(
        typed_view(shard_, part.shard_offset, part.numel, param.dtype()).view(padded_sizes),
        param.gather_info());
    TORCH_CHECK_VALUE(
        !payload.tensors.empty(), "[fully_shard] the all-gather extension of '", param.name(),
        "' sends no tensor");
    for (auto& tensor : payload.tensors) {
      tensor = tensor.dim() == 0 ? tensor.view({1}) : tensor.contiguous();
      pieces.push_back(tensor.view(-1).view(at::kByte));
    }
    payloads_.push_back({&param, std::move(payload)});
  }
  return at::cat(pieces);
}

void FSDPParamGroup::wait_for_unshard() {
  if (!pending_) {
    if (is_unsharded()) {
      show(Face::Unsharded); // kept from the iteration before
    }
    return;
  }
  const bool forward = training_state == TrainingState::Forward;
  if (forward) {
    comm->release_parked();
  }
  const auto current = optional_current_stream(device());
  pending_->wait(current);
  if (unsharded_ && !pending_->buffer.is_same(unsharded_->tensor())) {
    unsharded_->allocate();
    copy_out_all();
  }
  post_forward_shard_ = at::Tensor();
  sharded_state_ = ShardedState::Unsharded;
  maybe_outdated_ = false;
  show(Face::Unsharded);
  auto copied_out = StreamEvent::of(current);
  if (forward && has_streams(device())) {
    comm->park(*std::move(pending_), std::move(copied_out));
  } else {
    comm->release(copied_out);
  }
  pending_.reset();
}

void FSDPParamGroup::copy_out_all() {
  at::NoGradGuard no_grad;
  const auto row = pending_->input.numel();
  auto targets = gather_targets_;
  auto numels = gather_numels_;
  targets.resize(num_plain_);
  for (const auto& [param, payload] : payloads_) {
    for (const auto& tensor : payload.tensors) {
      numels.push_back(static_cast<int64_t>(tensor.nbytes()));
      targets.emplace_back();
    }
  }
  for (size_t k = 0; k < targets.size(); ++k) {
    if (!targets[k].defined()) {
      // No run of the whole (another dim than 0, or packed): by way of a copy.
      targets[k] = at::empty({group_.size(), numels[k]}, shard_.options());
    }
  }
  copy_out(pending_->buffer, numels, row, targets);
  for (size_t k = 0; k < num_plain_; ++k) {
    auto& param = *params_[order_[k]];
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
  copy_out_payloads({targets.begin() + static_cast<int64_t>(num_plain_), targets.end()});
}

void FSDPParamGroup::copy_out_payloads(std::vector<at::Tensor> outputs) {
  auto next = outputs.begin();
  for (auto& [param, payload] : payloads_) {
    std::vector<at::Tensor> received;
    for (const auto& tensor : payload.tensors) {
      auto sizes = tensor.sizes().vec();
      sizes[0] *= group_.size();
      received.push_back((next++)->view(-1).view(tensor.scalar_type()).view(sizes));
    }
    auto whole = param->unsharded().detach();
    param->extension->post_all_gather(received, payload.metadata, param->gather_info(), whole);
  }
  payloads_.clear();
}

void FSDPParamGroup::reshard() {
  const bool forward = training_state == TrainingState::Forward;
  if (forward && post_forward_ranks_ == 0) {
    return;
  }
  EventLog::record(EventLog::Kind::Reshard, name_, training_state);
  if (forward && post_forward_ranks_ < group_.size()) {
    to_sharded_post_forward();
  } else {
    to_sharded();
  }
}

void FSDPParamGroup::to_sharded() {
  show(Face::Sharded);
  post_forward_shard_ = at::Tensor();
  if (unsharded_ && unsharded_->allocated() && !pending_) {
    unsharded_->free();
  }
  sharded_state_ = ShardedState::Sharded;
  maybe_outdated_ = false;
}

void FSDPParamGroup::to_sharded_post_forward() {
  if (!is_unsharded()) {
    return;
  }
  at::NoGradGuard no_grad;
  const auto numel = unsharded_numel_ / post_forward_ranks_;
  const auto rank = group_.rank() % post_forward_ranks_;
  auto kept = unsharded_->tensor().narrow(0, rank * numel, numel).clone();
  to_sharded();
  post_forward_shard_ = std::move(kept);
  sharded_state_ = ShardedState::ShardedPostForward;
}

void FSDPParamGroup::show(Face face) {
  if (face == shown_) {
    return;
  }
  for (const auto& param : params_) {
    if (unsharded_ && face == Face::Sharded && param->take_unsharded_edit()) {
      TORCH_WARN(
          "[fully_shard] parameter '", param->name(),
          "' was written to while it was unsharded; this is lost. Write to its shard, while it is "
          "resharded");
    }
    param->show(face);
  }
  shown_ = face;
}

// ------------------------------------------------------------ One iteration

void FSDPParamGroup::pre_forward() {
  training_state = TrainingState::Forward;
  was_unsharded_ = is_unsharded() && !maybe_outdated_;
  const bool was_shown = shown_ == Face::Unsharded;
  unshard();
  wait_for_unshard();
  was_unsharded_ = was_unsharded_ && was_shown;
}

void FSDPParamGroup::post_forward() {
  if (at::GradMode::is_enabled()) {
    reshard();
  } else if (post_forward_ranks_ == group_.size()) {
    reshard();
  } else if (!was_unsharded_) {
    // No backward will come to reshard what is kept, and it must not be taken
    // for what an optimizer has made of it.
    to_sharded();
  }
}

bool FSDPParamGroup::pre_backward() {
  if (training_state == TrainingState::PreBackward) {
    return false; // another output of the same forward
  }
  training_state = TrainingState::PreBackward;
  unshard();
  wait_for_unshard();
  return true;
}

void FSDPParamGroup::prefetch(TrainingState state) {
  const auto own = std::exchange(training_state, state);
  try {
    unshard();
  } catch (...) {
    training_state = own;
    throw;
  }
  training_state = own;
}

bool FSDPParamGroup::has_unsharded_grads() const {
  return std::any_of(params_.begin(), params_.end(), [](const auto& param) {
    return param->unsharded_grad().defined();
  });
}

void FSDPParamGroup::post_backward() {
  training_state = TrainingState::PostBackward;
  if (reshard_after_backward) {
    reshard();
  } else {
    show(Face::Sharded);
  }
  if (reduce_grads) {
    comm->finish_reductions(comm->max_input_buffers - 1);
    std::vector<at::ScalarType> dtypes; // each is reduced by itself
    for (const auto& param : params_) {
      const bool reduced = param->unsharded_grad().defined() ||
                           (reduce_scatter_unused_params && param->tensor().requires_grad());
      if (reduced && std::find(dtypes.begin(), dtypes.end(), param->dtype()) == dtypes.end()) {
        dtypes.push_back(param->dtype());
      }
    }
    const CollectiveLabel label(name_);
    for (const auto dtype : dtypes) {
      reduce(dtype);
    }
  }
  EventLog::record(EventLog::Kind::PostBackward, name_, training_state);
}

void FSDPParamGroup::reduce(at::ScalarType dtype) {
  at::NoGradGuard no_grad;
  Reduction reduction;
  std::vector<ReduceInput> inputs;
  for (const auto& param : params_) {
    if (param->dtype() != dtype) {
      continue;
    }
    auto grad = param->take_unsharded_grad();
    if (!grad.defined() && reduce_scatter_unused_params && param->tensor().requires_grad()) {
      grad = at::zeros(param->geometry().sizes, param->unsharded().options());
    }
    if (grad.defined()) {
      reduction.params.push_back(param.get());
      inputs.push_back({std::move(grad), param->geometry().dim});
    }
  }
  const auto dtype_on_wire = reduce_dtype.value_or(inputs.front().grad.scalar_type());
  if (alone()) {
    for (size_t i = 0; i < reduction.params.size(); ++i) {
      const auto& grad = inputs[i].grad;
      const double factor = gradient_divide_factor.value_or(1);
      reduction.params[i]->add_sharded_grad(factor == 1 ? grad : grad.div(factor));
    }
    return;
  }
  reduction.request = {
      .group = reduce_group_,
      .reduce_dtype = dtype_on_wire,
      .result_dtype = dtype,
      .factors = divide_factors(
          {.reduce_dtype = dtype_on_wire,
           .shard_size = group_.size(),
           .factor = gradient_divide_factor,
           .force_sum = force_sum_reduction}),
      .stream = comm->reduce_scatter_stream()};
  reduction.reducing = start_reduce(*reduce_scatter_, inputs, reduction.request);
  reductions_.push_back(std::move(reduction));
  comm->add_reduction(weak_from_this());
}

void FSDPParamGroup::finish_reduction() {
  if (reductions_.empty()) {
    return; // reset in between
  }
  auto reduction = std::move(reductions_.front());
  reductions_.pop_front();
  const auto compute = optional_current_stream(device());
  {
    const c10::OptionalStreamGuard on(reduction.request.stream);
    const auto flat = finish_reduce(reduction.reducing, reduction.request);
    int64_t offset = 0;
    for (auto* param : reduction.params) {
      const auto& geometry = param->geometry();
      param->add_sharded_grad(
          shaped(flat.narrow(0, offset, geometry.padded_numel), geometry.shard_sizes));
      offset += geometry.padded_numel;
    }
  }
  // The input's memory goes back to compute.
  wait_for_stream(compute, reduction.request.stream);
}

void FSDPParamGroup::end_backward(bool is_last) {
  training_state = TrainingState::Idle;
  show(Face::Sharded);
  // Between microbatches memory may be kept. After the last, an optimizer may
  // step, which version counters do not always tell.
  maybe_outdated_ = is_unsharded() && is_last && reduce_grads;
  if (is_last) {
    drop_pending();
  }
}

void FSDPParamGroup::drop_pending() {
  if (pending_) {
    pending_->wait(optional_current_stream(device())); // its buffer is being written
    pending_.reset();
    payloads_.clear();
    to_sharded();
  }
}

void FSDPParamGroup::reset() {
  training_state = TrainingState::Idle;
  pending_.reset(); // not waited for: the peers may be gone
  payloads_.clear();
  reductions_.clear();
  to_sharded();
  for (const auto& param : params_) {
    param->take_unsharded_grad();
  }
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
