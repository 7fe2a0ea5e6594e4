// How a group's shards become whole parameters.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>

#include <numeric>
#include <utility>

#include "group/flat_params.h"
#include "group/flat_views.h"

namespace fsdp::detail {

namespace {

/// Calls a function of an extension. An error that it throws names the parameter.
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

ParamsGather FlatParams::start_gather(
    const std::shared_ptr<AllGather>& comm, const GatherStreams& streams, SpareMemory& memory) {
  const bool is_default = comm == default_all_gather();
  const bool placed = backend_places_ && is_default;
  ParamsGather gather;
  {
    const c10::OptionalStreamGuard on(streams.copy_in);
    // A gather of the user's own may write to its output before it reads its input.
    const bool in_place = is_default && !placed && !alone();
    make_gather_input(gather, in_place ? comm.get() : nullptr);
    copied_in_ = StreamEvent::of(offload_ ? streams.copy_in : std::nullopt);
  }
  auto& pending = static_cast<PendingGather&>(gather);
  if (alone()) {
    pending.buffer = pending.input;
    pending.issued = StreamEvent::of(streams.copy_in);
  } else if (placed) {
    auto whole = has_streams(device()) ? at::Tensor() : empty_whole(memory);
    pending =
        start_placed_gather(std::move(pending.input), ranks_, plan_, streams, std::move(whole));
  } else {
    pending = detail::start_gather(
        *comm, std::move(pending.input), ranks_, streams, std::move(pending.buffer));
  }
  return gather;
}

/// Makes the input, which this rank sends: the shard buffer itself, or one copy of it that casts,
/// moves to the device and makes room for payloads. With an `allocator` the copy is made in this
/// rank's part of a new buffer, into which the gather then writes.
void FlatParams::make_gather_input(ParamsGather& gather, AllGather* allocator) {
  const bool on_device = shard_.device() == device();
  if (on_device && (layout_.sends_shards() || (alone() && layout_.all_plain()))) {
    gather.input = shard_; // a single rank casts in the copy-out instead
    return;
  }
  at::NoGradGuard no_grad;
  // All shards move to the device in one transfer, and are cast there.
  const auto shard =
      on_device || layout_.sends_shards() ? shard_ : shard_.to(device(), /*non_blocking=*/true);
  gather.payloads = make_payloads(shard);
  auto numel = layout_.gathered_numel;
  for (const auto& sent : gather.payloads) {
    for (const auto& tensor : sent.payload.tensors) {
      numel += static_cast<int64_t>(tensor.nbytes()); // a group with payloads is sent as bytes
    }
  }
  const auto options = at::TensorOptions().device(device()).dtype(layout_.gather_dtype);
  auto& input = gather.input;
  constexpr int64_t kAlignment = 16; // so that a part can be seen as any dtype
  if (allocator && numel * static_cast<int64_t>(options.dtype().itemsize()) % kAlignment == 0) {
    gather.buffer = allocator->allocate({numel * ranks_.size()}, options);
    input = gather.buffer.narrow(0, ranks_.rank() * numel, numel);
  } else {
    input = at::empty({numel}, options);
  }
  for (const auto& run : layout_.runs) {
    auto to = typed_view(input, run.gathered.offset, run.gathered.numel, run.gather_dtype);
    to.copy_(
        typed_view(shard, run.shard.offset, run.shard.numel, run.dtype), /*non_blocking=*/true);
  }
  auto offset = layout_.gathered_numel;
  for (const auto& sent : gather.payloads) {
    for (const auto& tensor : sent.payload.tensors) {
      const auto bytes = static_cast<int64_t>(tensor.nbytes());
      input.narrow(0, offset, bytes).copy_(tensor.view(-1).view(at::kByte), /*non_blocking=*/true);
      offset += bytes;
    }
  }
}

/// Calls pre_all_gather of the extensions.
std::vector<SentPayload> FlatParams::make_payloads(const at::Tensor& shard) const {
  std::vector<SentPayload> payloads;
  for (size_t k = layout_.num_plain; k < params_.size(); ++k) {
    auto& param = *params_[layout_.order[k]];
    const auto& part = layout_.parts[layout_.order[k]].shard;
    const auto& geometry = param.geometry();
    TORCH_CHECK_NOT_IMPLEMENTED(
        geometry.merged_dims == 1, "[fully_shard] parameter '", param.name(),
        "' has an all-gather extension and cannot be a BlockShard; shard it along dim 0");
    TORCH_CHECK_NOT_IMPLEMENTED(
        geometry.dim == 0 || geometry.sizes[geometry.dim] % geometry.num_ranks == 0,
        "[fully_shard] parameter '", param.name(),
        "' has an all-gather extension and cannot be "
        "divided evenly along dim ",
        geometry.dim, "; shard it along dim 0");
    auto payload = in_extension("pre_all_gather", param, [&] {
      const auto own = param.is_opaque() ? param.sharded()
                                         : typed_view(shard, part.offset, part.numel, param.dtype())
                                               .view(geometry.padded_sizes);
      return param.extension->pre_all_gather(own, param.gather_info());
    });
    TORCH_CHECK_VALUE(
        !payload.tensors.empty(), "[fully_shard] the all-gather extension of '", param.name(),
        "' sends no tensor");
    for (auto& tensor : payload.tensors) {
      TORCH_CHECK_VALUE(
          tensor.defined(), "[fully_shard] the all-gather extension of '", param.name(),
          "' sends an undefined tensor");
      tensor = tensor.dim() == 0 ? tensor.view({1}) : tensor.contiguous();
    }
    payloads.push_back({&param, param.extension, std::move(payload)});
  }
  return payloads;
}

void FlatParams::take(ParamsGather& gathered, SpareMemory& memory) {
  told_of_write_ = false;
  if (gathered.placed) {
    whole_->adopt(std::exchange(gathered.buffer, at::Tensor()));
    whole_stream_ = gathered.stream;
    gathered.work = {}; // it may hold on to the buffer
  } else if (whole_) {
    whole_->adopt(empty_whole(memory));
    copy_out_all(gathered);
  }
  divided_ = at::Tensor();
}

/// Returns memory for the whole parameters.
at::Tensor FlatParams::empty_whole(SpareMemory& memory) const {
  const auto& whole = whole_->tensor();
  return memory.empty(whole.numel(), whole.options());
}

/// None of the copies moves a version counter.
void FlatParams::copy_out_all(const ParamsGather& gathered) {
  at::NoGradGuard no_grad;
  if (divided_.defined()) { // the neighbours' parts, one behind the other, are the whole
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    whole_->tensor().copy_(gathered.buffer);
  } else if (gathered.buffer.is_same(shard_)) { // one rank: a copy that casts
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const auto& param : params_) {
      const auto& geometry = param->geometry();
      const auto& shard = param->sharded();
      param->unsharded().copy_(geometry.merged_dims > 1 ? shard.view(geometry.sizes) : shard);
    }
  } else if (plan_ && device().is_cpu()) {
    copy_out(gathered.buffer, *plan_, whole_->tensor());
  } else {
    copy_out_parts(gathered);
  }
}

/// Copies every rank's parts to where they belong. A part that is no run of the whole parameter
/// (sharded along another dim than 0, or sent by an extension) takes a second copy.
void FlatParams::copy_out_parts(const ParamsGather& gathered) {
  auto targets = gather_targets_;
  auto numels = gather_numels_;
  targets.resize(layout_.num_plain);
  for (const auto& sent : gathered.payloads) {
    for (const auto& tensor : sent.payload.tensors) {
      numels.push_back(static_cast<int64_t>(tensor.nbytes()));
      targets.emplace_back();
    }
  }
  const c10::InferenceMode not_inference(false); // an extension may keep its targets for training
  for (size_t k = 0; k < targets.size(); ++k) {
    if (!targets[k].defined()) {
      targets[k] = at::empty({ranks_.size(), numels[k]}, gathered.buffer.options());
    }
  }
  if (const auto row = gathered.input.numel(); row > 0) {
    copy_out(gathered.buffer, numels, row, targets);
  }
  for (size_t k = 0; k < layout_.num_plain; ++k) {
    auto& param = *params_[layout_.order[k]];
    const auto& geometry = param.geometry();
    if (geometry.dim != 0) {
      auto pieces = typed_view(targets[k].view(-1), 0, targets[k].numel(), gather_dtype(param))
                        .view({ranks_.size(), geometry.padded_numel})
                        .unbind(0);
      for (int64_t rank = 0; rank < ranks_.size(); ++rank) { // the padding comes last
        const auto sizes = geometry.shard_sizes_of(rank);
        pieces[rank] = pieces[rank].narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
      }
      auto whole = param.unsharded().detach();
      at::cat_out(whole, pieces, geometry.dim);
    }
  }
  copy_out_payloads(
      gathered, {targets.begin() + static_cast<int64_t>(layout_.num_plain), targets.end()});
}

void FlatParams::copy_out_payloads(
    const ParamsGather& gathered, const std::vector<at::Tensor>& outputs) {
  auto next = outputs.begin();
  for (const auto& [param, extension, payload] : gathered.payloads) {
    std::vector<at::Tensor> received;
    for (const auto& tensor : payload.tensors) {
      auto sizes = tensor.sizes().vec();
      sizes[0] *= ranks_.size();
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

// ------------------------------------------------------------ Divided over neighbours

void FlatParams::set_neighbours(int num_ranks) {
  for (const auto& param : params_) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !param->is_opaque(), "[fully_shard] parameter '", param->name(),
        "' is a tensor subclass, which cannot be divided over ", num_ranks,
        " ranks after forward; use true or false for reshard_after_forward");
  }
  std::vector<int> members(num_ranks);
  std::iota(members.begin(), members.end(), ranks_.rank() / num_ranks * num_ranks);
  neighbours_ = ranks_.new_group(members);
}

void FlatParams::divide() {
  at::NoGradGuard no_grad;
  const auto numel = layout_.unsharded_numel / neighbours_.size();
  divided_ = whole_->tensor().narrow(0, neighbours_.rank() * numel, numel).clone();
}

ParamsGather FlatParams::start_neighbour_gather(AllGather& comm, const GatherStreams& streams) {
  // The current stream has written this rank's part.
  wait_for_stream(streams.copy_in, optional_current_stream(device()));
  return {detail::start_gather(comm, divided_, neighbours_, streams), {}};
}

} // namespace fsdp::detail
