// How a group's parameters become whole, and shards again.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "group/flat_views.h"
#include "group/param_group.h"
#include "process_group/observer.h"
#include "runtime/range.h"

namespace fsdp::detail {

namespace {

/// Calls an extension; what it throws names the parameter.
template <class F>
auto in_extension(const char* function, const FSDPParam& param, F call) {
  try {
    return call();
  } catch (c10::Error& error) {
    error.add_context(c10::str("in ", function, " of '", param.name(), "'"));
    throw;
  }
}

} // namespace

void FSDPParamGroup::unshard(bool async_op, bool for_recomputation) {
  if ((pending_ || (is_unsharded() && !maybe_outdated_)) && !was_changed()) {
    return;
  }
  drop_pending(); // outdated
  record_event(EventLog::Kind::Unshard, name_, training_state);
  if (!unshard_in_backward && !for_recomputation && training_state == TrainingState::PreBackward) {
    return;
  }
  const Range range("all_gather", label_);
  const CollectiveLabel collective(name_);
  const auto streams = comm->gather_streams(
      device(), !async_op && (training_state == TrainingState::Forward ||
                              training_state == TrainingState::PreBackward));
  if (sharded_state_ == ShardedState::ShardedPostForward &&
      training_state == TrainingState::PreBackward) {
    wait_for_stream(streams.copy_in, optional_current_stream(device())); // has made that shard
    pending_ = start_gather(*all_gather_, post_forward_shard_, post_forward_group_, streams);
    comm->gather_issued(static_cast<int64_t>(pending_->buffer.nbytes()));
    return;
  }
  lazy_init();
  post_forward_shard_ = at::Tensor(); // a forward wants the shards as they are now
  sharded_state_ = is_unsharded() ? sharded_state_ : ShardedState::Sharded;
  const bool placed = places_ && all_gather_ == default_all_gather();
  at::Tensor buffer;
  at::Tensor input;
  {
    const c10::OptionalStreamGuard on(streams.copy_in);
    // One of the user's own may write to its output before it reads its input.
    const bool in_place = !placed && !alone() && all_gather_ == default_all_gather();
    input = gather_input(in_place ? &buffer : nullptr);
    copied_in_ = StreamEvent::of(offload_ ? streams.copy_in : std::nullopt);
  }
  if (alone()) {
    pending_ = Gathered{
        .input = input, .buffer = input, .work = {}, .issued = StreamEvent::of(streams.copy_in)};
    return;
  }
  if (placed) {
    pending_ = start_placed_gather(std::move(input), group_, plan_, streams);
  } else {
    pending_ = start_gather(*all_gather_, std::move(input), group_, streams, std::move(buffer));
  }
  comm->gather_issued(static_cast<int64_t>(pending_->buffer.nbytes()));
}

/// What this rank sends: the shard buffer as it lies, or one copy of it that
/// casts, moves to the device and makes room for payloads on the way. The copy
/// is made in this rank's part of `buffer`, which is allocated for it.
at::Tensor FSDPParamGroup::gather_input(at::Tensor* buffer) {
  const bool on_device = shard_.device() == device();
  if (on_device && (layout_.sends_shards() || (alone() && layout_.all_plain()))) {
    return shard_; // alone it is cast when it is copied out
  }
  at::NoGradGuard no_grad;
  // One transfer, cast where that is quick.
  const auto shard =
      on_device || layout_.sends_shards() ? shard_ : shard_.to(device(), /*non_blocking=*/true);
  const auto payload_numel = make_payloads(shard);
  const auto numel = layout_.gathered_numel + payload_numel;
  const auto options = at::TensorOptions().device(device()).dtype(layout_.gather_dtype);
  at::Tensor input;
  constexpr int64_t kAlignment = 16; // so that a part can be seen as any dtype
  if (buffer && numel * static_cast<int64_t>(options.dtype().itemsize()) % kAlignment == 0) {
    *buffer = all_gather_->allocate({numel * group_.size()}, options);
    input = buffer->narrow(0, group_.rank() * numel, numel);
  } else {
    input = at::empty({numel}, options);
  }
  for (const auto& run : layout_.runs) {
    auto to = typed_view(input, run.gathered.offset, run.gathered.numel, run.gather_dtype);
    to.copy_(
        typed_view(shard, run.shard.offset, run.shard.numel, run.dtype), /*non_blocking=*/true);
  }
  auto offset = layout_.gathered_numel;
  for (const auto& sent : payloads_) {
    for (const auto& tensor : sent.payload.tensors) {
      const auto bytes = static_cast<int64_t>(tensor.nbytes());
      input.narrow(0, offset, bytes).copy_(tensor.view(-1).view(at::kByte), /*non_blocking=*/true);
      offset += bytes;
    }
  }
  return input;
}

/// Lets the extensions make what they send; returns its bytes.
int64_t FSDPParamGroup::make_payloads(const at::Tensor& shard) {
  std::vector<Payload> payloads;
  int64_t bytes = 0;
  for (size_t k = layout_.num_plain; k < params_.size(); ++k) {
    auto& param = *params_[layout_.order[k]];
    const auto& part = layout_.parts[layout_.order[k]].shard;
    auto payload = in_extension("pre_all_gather", param, [&] {
      return param.extension->pre_all_gather(
          typed_view(shard, part.offset, part.numel, param.dtype())
              .view(param.geometry().padded_sizes),
          param.gather_info());
    });
    TORCH_CHECK_VALUE(
        !payload.tensors.empty(), "[fully_shard] the all-gather extension of '", param.name(),
        "' sends no tensor");
    for (auto& tensor : payload.tensors) {
      TORCH_CHECK_VALUE(
          tensor.defined(), "[fully_shard] the all-gather extension of '", param.name(),
          "' sends an undefined tensor");
      tensor = tensor.dim() == 0 ? tensor.view({1}) : tensor.contiguous();
      bytes += static_cast<int64_t>(tensor.nbytes());
    }
    payloads.push_back({&param, param.extension, std::move(payload)});
  }
  payloads_ = std::move(payloads);
  return bytes;
}

void FSDPParamGroup::wait_for_unshard() {
  if (!pending_) {
    if (is_unsharded() && !maybe_outdated_) {
      show(Face::Unsharded); // kept from the microbatch before
    }
    return;
  }
  if (was_changed()) {
    unshard(); // again, with what was put there in between
  }
  const bool forward = training_state == TrainingState::Forward;
  if (forward) {
    comm->release_parked();
  }
  const Range range("all_gather_copy_out", label_);
  const auto current = optional_current_stream(device());
  try {
    pending_->wait(current);
    if (pending_->placed) {
      if (unsharded_->allocated()) {
        free_unsharded(); // outdated
      }
      unsharded_->adopt(std::exchange(pending_->buffer, at::Tensor()));
      unsharded_stream_ = pending_->stream;
      pending_->work = {}; // it may hold on to the buffer
    } else if (unsharded_) {
      unsharded_->allocate();
      copy_out_all();
    }
  } catch (...) { // of the collective or an extension: the next unshard begins anew
    forget_pending();
    to_sharded();
    throw;
  }
  post_forward_shard_ = at::Tensor();
  sharded_state_ = ShardedState::Unsharded;
  maybe_outdated_ = false;
  show(Face::Unsharded);
  if (pending_->placed && pending_->input.is_same(shard_)) {
    forget_pending(); // none of its memory is free now
    return;
  }
  auto copied_out = StreamEvent::of(current);
  if (forward && has_streams(device())) {
    comm->park(*std::move(pending_), std::move(copied_out));
  } else {
    comm->gather_after(copied_out);
  }
  forget_pending();
}

void FSDPParamGroup::copy_out_all() {
  at::NoGradGuard no_grad;
  if (post_forward_shard_.defined()) {
    at::AutoDispatchBelowADInplaceOrView below_autograd; // as copy_out
    unsharded_->tensor().copy_(pending_->buffer);
    return;
  }
  const auto row = pending_->input.numel();
  if (pending_->buffer.is_same(shard_)) { // alone: one copy that casts
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const auto& param : params_) {
      param->unsharded().copy_(param->sharded());
    }
    return;
  }
  if (plan_ && device().is_cpu()) {
    copy_out(pending_->buffer, *plan_, unsharded_->tensor());
    return;
  }
  auto targets = gather_targets_;
  auto numels = gather_numels_;
  targets.resize(layout_.num_plain);
  for (const auto& [param, extension, payload] : payloads_) {
    for (const auto& tensor : payload.tensors) {
      numels.push_back(static_cast<int64_t>(tensor.nbytes()));
      targets.emplace_back();
    }
  }
  for (size_t k = 0; k < targets.size(); ++k) {
    if (!targets[k].defined()) {
      // No run of the whole (another dim than 0, or packed): by way of a copy.
      targets[k] = at::empty({group_.size(), numels[k]}, pending_->buffer.options());
    }
  }
  if (row > 0) {
    copy_out(pending_->buffer, numels, row, targets);
  }
  for (size_t k = 0; k < layout_.num_plain; ++k) {
    auto& param = *params_[layout_.order[k]];
    const auto& geometry = param.geometry();
    if (geometry.dim != 0) {
      auto pieces = typed_view(targets[k].view(-1), 0, targets[k].numel(), gather_dtype(param))
                        .view({group_.size(), geometry.padded_numel})
                        .unbind(0);
      for (auto& piece : pieces) {
        piece = piece.view(geometry.shard_sizes); // even, so every rank's are the same
      }
      auto whole = param.unsharded().detach();
      at::cat_out(whole, pieces, geometry.dim);
    }
  }
  copy_out_payloads({targets.begin() + static_cast<int64_t>(layout_.num_plain), targets.end()});
}

void FSDPParamGroup::copy_out_payloads(std::vector<at::Tensor> outputs) {
  auto next = outputs.begin();
  for (auto& [param, extension, payload] : payloads_) {
    std::vector<at::Tensor> received;
    for (const auto& tensor : payload.tensors) {
      auto sizes = tensor.sizes().vec();
      sizes[0] *= group_.size();
      received.push_back((next++)->view(-1).view(tensor.scalar_type()).view(sizes));
    }
    const auto& expected = param->unsharded();
    auto whole = expected.detach();
    const auto given = whole;
    in_extension("post_all_gather", *param, [&] {
      extension->post_all_gather(received, payload.metadata, param->gather_info(), whole);
      TORCH_CHECK_VALUE(
          whole.is_same(given) && given.is_alias_of(expected) &&
              given.storage_offset() == expected.storage_offset() &&
              given.scalar_type() == expected.scalar_type() && given.sizes() == expected.sizes() &&
              given.strides() == expected.strides(),
          "[fully_shard] it has replaced or resized `out`, of sizes ", expected.sizes(),
          "; fill it in place");
    });
  }
}

void FSDPParamGroup::reshard() {
  const bool forward = training_state == TrainingState::Forward;
  if (forward && post_forward_ranks_ == 0) {
    return;
  }
  record_event(EventLog::Kind::Reshard, name_, training_state);
  if (training_state == TrainingState::Idle) {
    wait_for_host_copies(); // the user may write to the shards now
  }
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
    free_unsharded();
  }
  sharded_state_ = ShardedState::Sharded;
  maybe_outdated_ = false;
  if (was_changed()) {
    discard_pending(); // of what was there before
    build();
  }
}

/// Where a gather allocated the memory, its stream must wait for the current one
/// before it goes; see Note [Who keeps communication buffers alive].
void FSDPParamGroup::free_unsharded() {
  auto memory = unsharded_->free();
  const auto stream = std::exchange(unsharded_stream_, std::nullopt);
  if (stream && stream != optional_current_stream(device())) {
    comm->retire(std::move(memory), stream, /*overlap=*/training_state == TrainingState::Forward);
  }
}

void FSDPParamGroup::to_sharded_post_forward() {
  if (!is_unsharded()) {
    return;
  }
  at::NoGradGuard no_grad;
  const auto numel = layout_.unsharded_numel / post_forward_ranks_;
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

} // namespace fsdp::detail
