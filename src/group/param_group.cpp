#include "group/param_group.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "param/unfilled.h"
#include "process_group/observer.h"
#include "runtime/range.h"

namespace fsdp::detail {

namespace {

bool is_in_backward(UnshardFor purpose) {
  return purpose == UnshardFor::Backward || purpose == UnshardFor::BackwardPrefetch ||
         purpose == UnshardFor::Recomputation;
}

/// The state that an EventLog shows for an unshard of this purpose.
TrainingState training_state(UnshardFor purpose) {
  if (purpose == UnshardFor::User) {
    return TrainingState::Idle;
  }
  return is_in_backward(purpose) ? TrainingState::PreBackward : TrainingState::Forward;
}

/// The state that an EventLog shows for a reshard at this time.
TrainingState training_state(ReshardAfter when) {
  switch (when) {
    case ReshardAfter::Forward:
      return TrainingState::Forward;
    case ReshardAfter::Backward:
      return TrainingState::PostBackward;
    case ReshardAfter::User:
      return TrainingState::Idle;
  }
  return TrainingState::Idle;
}

} // namespace

FSDPParamGroup::FSDPParamGroup(
    const std::vector<ParamSpec>& params,
    const DataParallelMesh& mesh,
    const std::string& name,
    const GroupPolicy& policy)
    : name_(name),
      replicas_(mesh.replicate_group),
      flat_(params, mesh, name, policy.precision.param_dtype, policy.offload),
      reducer_(std::make_shared<GradReducer>(
          flat_,
          replicas_,
          // If both are the same, gradients are computed in it already.
          policy.precision.reduce_dtype == policy.precision.param_dtype
              ? std::nullopt
              : policy.precision.reduce_dtype)),
      ranks_after_forward_(size()),
      from_first_replica_(policy.from_first_replica && replicas_) {
  reducer_->set_name(name);
}

void FSDPParamGroup::enter(ParamsState next) {
  check_transition(state_, next, name_);
  state_ = next;
  flat_.show(modules_see_whole() ? Face::Unsharded : Face::Sharded);
}

void FSDPParamGroup::set_name(const std::string& name, int64_t model, bool one_of_several) {
  name_ = name;
  label_ = name.empty() ? "" : " (" + name + ")";
  if (one_of_several) {
    label_ += c10::str(" [pg=", size(), "]");
  }
  flat_.set_owner(name, model);
  reducer_->set_name(name);
}

void FSDPParamGroup::lazy_init() {
  const bool was_changed = take_replacements();
  flat_.check_trainable();
  if (was_changed) {
    discard_gather();
    to_sharded();
  }
  if (from_first_replica_) {
    take_first_replica();
  }
}

void FSDPParamGroup::adopt() {
  if (state_ == ParamsState::Sharded) {
    const bool was_changed = take_replacements();
    const auto device = params().front()->tensor().device();
    if (was_changed && std::all_of(params().begin(), params().end(), [&](const auto& param) {
          return param->tensor().device() == device;
        })) {
      to_sharded();
    }
  }
}

/// Replicas that begin with different values would stay different, without a word. So all take
/// over the first one's values, once, in the first forward: before it, some ranks may have no
/// values yet. If values are missing then, forward refuses to run.
void FSDPParamGroup::take_first_replica() {
  if (std::any_of(params().begin(), params().end(), [](const auto& param) {
        return is_unfilled(param->tensor());
      })) {
    return;
  }
  from_first_replica_ = false;
  at::NoGradGuard no_grad;
  const CollectiveLabel collective(name_, &flat_.purpose());
  const auto& shard = flat_.shard();
  const auto values = shard.to(flat_.compute_device()); // where the ranks communicate
  replicas_->broadcast(values, /*root=*/0);
  if (!values.is_same(shard)) {
    shard.copy_(values);
  }
  comm->gather_after(StreamEvent::of(optional_current_stream(flat_.device())));
}

// ------------------------------------------------------------ Parameters

void FSDPParamGroup::unshard(UnshardFor purpose) {
  if (modules_see_whole()) {
    flat_.check_whole_unwritten();
  }
  if (modules_see_whole() || state_ == ParamsState::Gathering || state_ == ParamsState::Kept) {
    if (is_current()) {
      return;
    }
    drop_gather();
  }
  record_event(EventLog::Kind::Unshard, name_, training_state(purpose));
  // A forward that backward recomputes needs the parameters even if backward itself does not.
  if (unshard_in_backward || !is_in_backward(purpose) || purpose == UnshardFor::Recomputation) {
    start_gather(purpose);
  }
}

/// True if nobody has replaced or written to a shard since the last gather.
bool FSDPParamGroup::is_current() {
  return !take_replacements() && shard_version() == gathered_version_;
}

void FSDPParamGroup::start_gather(UnshardFor purpose) {
  const Range range("all_gather", label_);
  const CollectiveLabel collective(name_, &flat_.purpose());
  const auto streams = comm->gather_streams(flat_.device(), /*own=*/purpose != UnshardFor::User);
  if (state_ == ParamsState::Divided && is_in_backward(purpose)) {
    gather_ = flat_.start_neighbour_gather(*all_gather_, streams);
  } else {
    lazy_init();
    if (state_ != ParamsState::Sharded) { // what is left of an earlier gather
      to_sharded(is_in_backward(purpose) ? ReshardAfter::Backward : ReshardAfter::Forward);
    }
    gather_ = flat_.start_gather(all_gather_, streams, comm->spare_memory);
    gathered_version_ = shard_version();
  }
  enter(ParamsState::Gathering);
  gathered_for_ = purpose;
  if (!flat_.alone()) {
    comm->gather_issued(static_cast<int64_t>(gather_->buffer.nbytes()));
  }
}

void FSDPParamGroup::wait_for_unshard(UnshardFor purpose) {
  if (state_ == ParamsState::Kept && is_current()) {
    enter(ParamsState::Unsharded);
    return;
  }
  if ((state_ == ParamsState::Gathering || state_ == ParamsState::Kept) && !is_current()) {
    unshard(purpose); // again, with the shards as they are now
  }
  if (state_ != ParamsState::Gathering) {
    flat_.show_to_users(flat_.shown());
    return;
  }
  const bool forward = purpose == UnshardFor::Forward;
  if (forward) {
    comm->release_parked();
  }
  const Range range("all_gather_copy_out", label_);
  const auto current = optional_current_stream(flat_.device());
  try {
    gather_->wait(current);
    flat_.take(*gather_, comm->spare_memory);
  } catch (...) { // the collective or an extension failed: the next unshard begins anew
    reset();
    throw;
  }
  auto gathered = *std::exchange(gather_, std::nullopt);
  enter(ParamsState::Unsharded);
  if (gathered.placed && gathered.input.is_same(flat_.shard())) {
    return; // all of its memory stays in use
  }
  auto copied_out = StreamEvent::of(current);
  if (forward && has_streams(flat_.device())) {
    comm->park(std::move(gathered), std::move(copied_out));
  } else {
    comm->gather_after(copied_out);
  }
}

void FSDPParamGroup::reshard(ReshardAfter when) {
  const bool forward = when == ReshardAfter::Forward;
  if (forward && (ranks_after_forward_ == 0 || state_ == ParamsState::KeptForGraph)) {
    return;
  }
  record_event(EventLog::Kind::Reshard, name_, training_state(when));
  if (when == ReshardAfter::User) {
    wait_for_host_copies(); // the user may write to the shards now
  }
  if (state_ == ParamsState::Gathering && !flat_.was_changed()) {
    return; // somebody will wait for it, and reshard then
  }
  flat_.check_whole_unwritten();
  if (when == ReshardAfter::User && modules_see_whole() && is_current()) {
    flat_.check_whole_values(/*only_steps=*/false);
  }
  discard_gather();
  if (forward && ranks_after_forward_ < size() && !flat_.was_changed()) {
    divide();
  } else {
    to_sharded(when);
  }
}

void FSDPParamGroup::divide() {
  if (state_ == ParamsState::Unsharded) {
    flat_.divide();
    enter(ParamsState::Divided);
    free_whole(ReshardAfter::Forward);
  }
}

/// Frees the whole parameters, and adopts shards that were replaced. No gather is under way.
void FSDPParamGroup::to_sharded(ReshardAfter when) {
  show_shards(when);
  if (flat_.was_changed()) {
    flat_.build();
    comm->gather_after(StreamEvent::of(optional_current_stream(flat_.device())));
  }
}

void FSDPParamGroup::show_shards(ReshardAfter when) {
  TORCH_INTERNAL_ASSERT(!gather_);
  enter(ParamsState::Sharded);
  flat_.drop_divided();
  free_whole(when);
}

/// Memory that a gather allocated on its own stream goes back to that stream; see Note [Who keeps
/// communication buffers alive]. On the CPU the next collective takes it.
void FSDPParamGroup::free_whole(ReshardAfter when) {
  auto [memory, stream] = flat_.free_whole();
  if (stream && stream != optional_current_stream(flat_.device())) {
    comm->retire(std::move(memory), stream, /*overlap=*/when == ReshardAfter::Forward);
  } else if (when != ReshardAfter::User && !flat_.alone()) {
    comm->spare_memory.keep(std::move(memory));
  }
}

/// Waits for the gather that is under way, and forgets it. The caller goes on to `to_sharded`.
void FSDPParamGroup::discard_gather() {
  if (gather_) {
    const auto current = optional_current_stream(flat_.device());
    gather_->wait(current);                       // its buffer is being written
    comm->gather_after(StreamEvent::of(current)); // and goes back to the copy-in stream
    gather_.reset();
  }
}

void FSDPParamGroup::drop_gather() {
  if (state_ == ParamsState::Gathering) {
    discard_gather();
    to_sharded();
  }
}

// ------------------------------------------------------------ One iteration

void FSDPParamGroup::pre_forward(bool entering) {
  const Range range("pre_forward", label_);
  if (entering) {
    reducer_->check_updated();
    whole_before_forward_ = modules_see_whole();
    check_no_step(); // the forward before may have had no backward
  }
  unshard(UnshardFor::Forward);
  wait_for_unshard(UnshardFor::Forward);
}

/// Throws if an optimizer has stepped on parameters that a forward left whole.
void FSDPParamGroup::check_no_step() {
  if (modules_see_whole() && gathered_for_ != UnshardFor::User && is_current()) {
    flat_.check_whole_values(/*only_steps=*/true);
  }
}

void FSDPParamGroup::post_forward() {
  const Range range("post_forward", label_);
  if (state_ == ParamsState::KeptForGraph && !at::GradMode::is_enabled()) {
    flat_.show_to_users(Face::Sharded); // they have gradients
    return;
  }
  if (at::GradMode::is_enabled() || ranks_after_forward_ == size()) {
    reshard(ReshardAfter::Forward);
    return;
  }
  // Without a backward nobody reshards later. Whole parameters that were kept would be used after
  // an optimizer has written to the shards.
  if (ranks_after_forward_ > 0) {
    record_event(EventLog::Kind::Reshard, name_, TrainingState::Forward);
  }
  if (ranks_after_forward_ > 0 || !whole_before_forward_) {
    flat_.check_whole_unwritten();
    discard_gather();
    to_sharded(ReshardAfter::Forward);
  }
}

void FSDPParamGroup::pre_backward() {
  const Range range("pre_backward", label_);
  if (flat_.device().is_cpu()) { // the host would wait for a GPU
    check_no_step();
  }
  unshard(UnshardFor::Backward);
  wait_for_unshard(UnshardFor::Backward);
}

void FSDPParamGroup::prefetch(UnshardFor purpose) {
  const Range range(
      purpose == UnshardFor::ForwardPrefetch ? "forward_prefetch for " : "backward_prefetch for ",
      name_);
  unshard(purpose);
}

void FSDPParamGroup::post_backward(BackwardKind kind) {
  const Range range("post_backward", label_);
  {
    const Range accumulating("post_backward_accumulate", label_);
    if (!reduce_grads) {
      reducer_->accumulate();
    }
  }
  if (kind.creates_graph && state_ == ParamsState::Unsharded) {
    enter(ParamsState::KeptForGraph);
  }
  const bool graph_needs_it = kind.creates_graph || state_ == ParamsState::KeptForGraph;
  if (!graph_needs_it && reshard_after_backward) {
    const Range resharding("post_backward_reshard", label_);
    reshard(ReshardAfter::Backward);
  } else if (!graph_needs_it) {
    keep_whole();
  }
  if (reduce_grads) {
    {
      const Range waiting("post_backward_rs_wait", label_);
      comm->reductions.make_room();
    }
    const Range reducing("post_backward_reduce", label_);
    const bool is_complete = reducer_->has_reduced_grads_hook() && kind.is_last &&
                             !graph_needs_it && !comm->expects_backward(*this);
    reducer_->start(comm->reductions, comm->spare_memory, is_complete);
  }
  record_event(EventLog::Kind::PostBackward, name_, TrainingState::PostBackward);
}

/// The modules see shards, and the whole parameters stay in memory.
void FSDPParamGroup::keep_whole() {
  if (modules_see_whole()) {
    flat_.check_whole_unwritten();
    enter(ParamsState::Kept);
  }
}

void FSDPParamGroup::end_backward(BackwardKind kind) {
  wait_for_host_copies();
  if (kind.is_last) {
    drop_gather();
  }
  if (kind.creates_graph) { // the graph of this backward needs them whole, but users want to see
                            // gradients
    flat_.show_to_users(Face::Sharded);
    return;
  }
  if (state_ == ParamsState::KeptForGraph && reshard_after_backward) {
    reshard(ReshardAfter::Backward);
  }
  keep_whole();
  // If the gradients are complete, an optimizer may step. Version counters do not always show that.
  const bool complete = kind.is_last && reduce_grads && (!replicas_ || reducer_->all_reduce_grads);
  if (state_ == ParamsState::Kept && complete) {
    enter(ParamsState::Outdated);
  }
  if (complete) { // also of groups whose last forward has no backward
    reducer_->report_complete();
  }
}

void FSDPParamGroup::drop_unused_prefetch() {
  if (gathered_for_ == UnshardFor::ForwardPrefetch) {
    drop_gather();
  }
}

void FSDPParamGroup::wait_for_host_copies() {
  flat_.wait_for_host_copies();
  reducer_->wait_for_host_copies();
}

void FSDPParamGroup::reset() {
  gather_.reset();
  show_shards(); // the next gather adopts shards that were replaced, and may refuse to
}

// ------------------------------------------------------------ Settings

void FSDPParamGroup::set_ranks_after_forward(int num_ranks) {
  ranks_after_forward_ = num_ranks;
  if (num_ranks > 0 && num_ranks < size()) {
    flat_.set_neighbours(num_ranks);
  }
}

void FSDPParamGroup::set_custom(std::shared_ptr<AllGather> comm_object) {
  all_gather_ = std::move(comm_object);
  custom_all_gather_ = true;
}

void FSDPParamGroup::allocate_from_process_group(bool enable) {
  TORCH_CHECK_VALUE(
      !custom_all_gather_ && !reducer_->is_custom(),
      "[fully_shard] cannot call set_allocate_memory_from_process_group_for_comm() when the ",
      custom_all_gather_ ? "all-gather" : "reduce-scatter", " of group '", name_,
      "' is custom: give the custom one an allocate() of its own");
  all_gather_ = enable ? process_group_all_gather(flat_.ranks()) : default_all_gather();
  reducer_->allocate_from_process_group(enable);
}

void FSDPParamGroup::set_on_grad(const std::function<void()>& on_grad) {
  for (const auto& param : params()) {
    param->set_on_grad(on_grad);
  }
}

} // namespace fsdp::detail
