#include "tensor/redistribute.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "layout/shard_layout.h"

namespace fsdp::detail {

namespace {

/// Returns `tensor` with `dim` moved to the front, contiguous and padded with zeros to `length`
/// rows. Collectives need such equal sizes.
at::Tensor padded_rows(const at::Tensor& tensor, int64_t dim, int64_t length) {
  auto rows = tensor.movedim(dim, 0);
  if (rows.size(0) == length) {
    return rows.contiguous();
  }
  auto sizes = rows.sizes().vec();
  sizes[0] = length;
  auto padded = at::zeros(sizes, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  return padded;
}

/// Returns the rows that rank `index` takes in `step`.
at::Tensor take(const at::Tensor& rows, const ShardStep& step, int64_t index) {
  const auto runs = step.runs(rows.size(0), index);
  if (runs.size() == 1) {
    return rows.narrow(0, runs[0].offset, runs[0].length);
  }
  std::vector<at::Tensor> pieces{rows.narrow(0, 0, 0)};
  for (const auto& run : runs) {
    pieces.push_back(rows.narrow(0, run.offset, run.length));
  }
  return at::cat(pieces);
}

/// The inverse of `take`: `pieces[index]` holds the rows that rank `index` took of `length` rows,
/// perhaps followed by padding.
at::Tensor put_together(
    const std::vector<at::Tensor>& pieces, const ShardStep& step, int64_t length) {
  auto sizes = pieces[0].sizes().vec();
  sizes[0] = length;
  auto rows = at::empty(sizes, pieces[0].options());
  for (size_t index = 0; index < pieces.size(); ++index) {
    int64_t start = 0;
    for (const auto& run : step.runs(length, static_cast<int64_t>(index))) {
      rows.narrow(0, run.offset, run.length).copy_(pieces[index].narrow(0, start, run.length));
      start += run.length;
    }
  }
  return rows;
}

/// Returns all ranks' parts of `rows` in `step`, each padded to the longest part, in one contiguous
/// [ranks, longest, ...] tensor.
at::Tensor padded_parts(const at::Tensor& rows, const ShardStep& step) {
  const auto longest = step.length(rows.size(0), 0);
  if (step.is_even(rows.size(0))) {
    return rows.contiguous().unflatten(0, {step.num_ranks, longest}); // already in this order
  }
  std::vector<at::Tensor> parts;
  for (int64_t index = 0; index < step.num_ranks; ++index) {
    parts.push_back(padded_rows(take(rows, step, index), 0, longest));
  }
  return at::stack(parts);
}

/// A redistribution in progress: the local tensor and its current placements.
class Redistribution {
 public:
  Redistribution(at::Tensor local, TensorSpec spec)
      : local_(std::move(local)), now_(std::move(spec)), coordinate_(now_.mesh.get_coordinate()) {}

  at::Tensor move_to(const std::vector<Placement>& target) {
    gather_blocks();
    const auto blocks = block_step(target, now_.mesh.shape());
    move_but_blocks(blocks ? without_blocks(target) : target);
    if (blocks) {
      take_blocks(*blocks);
    }
    return local_;
  }

  /// Scatters or broadcasts along every axis from the axis's first rank. A source rank that does
  /// not have the right values yet passes on its own; a later axis overwrites them.
  at::Tensor distribute_to(const std::vector<Placement>& target) {
    const auto blocks = block_step(target, now_.mesh.shape());
    distribute_but_blocks(blocks ? without_blocks(target) : target);
    if (blocks) {
      take_blocks(*blocks);
    }
    return local_;
  }

 private:
  static std::vector<Placement> without_blocks(std::vector<Placement> placements) {
    for (auto& placement : placements) {
      if (std::holds_alternative<BlockShard>(placement)) {
        placement = Replicate{};
      }
    }
    return placements;
  }

  /// Undoes a BlockShard, which divided last.
  void gather_blocks() {
    const auto& shape = now_.mesh.shape();
    const auto blocks = block_step(now_.placements, shape);
    if (!blocks) {
      return;
    }
    const auto whole = sizes_before_blocks(now_.sizes, now_.placements, shape, coordinate_);
    const auto dim = blocks->dims - 1;
    const ShardStep step{.axis = blocks->axis, .num_ranks = blocks->num_ranks};
    gather(step, dim, merged_sizes(whole, blocks->dims)[static_cast<size_t>(dim)]);
    local_ = local_.view(whole);
    now_.placements[static_cast<size_t>(blocks->axis)] = Replicate{};
  }

  /// Keeps this rank's rows. Needs no communication.
  void take_blocks(const BlockStep& blocks) {
    const auto rows = local_.reshape(merged_sizes(local_.sizes().vec(), blocks.dims));
    const auto dim = blocks.dims - 1;
    const auto run = chunk_run(rows.size(dim), blocks.num_ranks, coordinate_[blocks.axis]);
    local_ = rows.narrow(dim, run.offset, run.length).clone(at::MemoryFormat::Contiguous);
  }

  void move_but_blocks(const std::vector<Placement>& target) {
    for (int64_t axis = 0; axis < num_axes(); ++axis) {
      if (std::holds_alternative<Partial>(now_.placements[axis]) &&
          now_.placements[axis] != target[axis]) {
        reduce(axis, target);
      }
    }
    for (int64_t dim = 0; dim < num_dims(); ++dim) {
      unshard(dim, target);
    }
    for (int64_t dim = 0; dim < num_dims(); ++dim) {
      shard(dim, target);
    }
    for (int64_t axis = 0; axis < num_axes(); ++axis) {
      if (const auto* partial = std::get_if<Partial>(&target[axis]);
          partial && now_.placements[axis] != target[axis]) {
        make_partial(axis, *partial);
      }
    }
  }

  void distribute_but_blocks(const std::vector<Placement>& target) {
    for (int64_t dim = 0; dim < num_dims(); ++dim) {
      for (const auto& step : steps(target, dim)) {
        scatter(step, dim);
      }
    }
    for (int64_t axis = 0; axis < num_axes(); ++axis) {
      if (shard_dim(target[axis]) < 0) {
        local_ = local_.contiguous();
        group(axis).broadcast(local_, 0);
      }
    }
    now_.placements = target;
    for (int64_t axis = 0; axis < num_axes(); ++axis) {
      if (const auto* partial = std::get_if<Partial>(&target[axis])) {
        make_partial(axis, *partial);
      }
    }
  }

  int64_t num_axes() const {
    return now_.mesh.ndim();
  }
  int64_t num_dims() const {
    return static_cast<int64_t>(now_.sizes.size());
  }
  ProcessGroup group(int64_t axis) const {
    return now_.mesh.get_group(axis);
  }
  std::vector<ShardStep> steps(const std::vector<Placement>& placements, int64_t dim) const {
    return shard_steps(placements, now_.mesh.shape(), dim);
  }
  /// Returns this rank's length of `dim` before the last step of `done`.
  int64_t length_before_last(const std::vector<ShardStep>& done, int64_t dim) const {
    return local_length(now_.sizes[dim], {done.begin(), done.end() - 1}, coordinate_);
  }

  /// Reduces the partial values of `axis`. If the target shard is the next step of its dim, a
  /// reduce-scatter makes the shard; otherwise an all-reduce makes every rank's value whole.
  void reduce(int64_t axis, const std::vector<Placement>& target) {
    const auto op = std::get<Partial>(now_.placements[axis]).op;
    const auto dim = shard_dim(target[axis]);
    if (dim >= 0) {
      const auto wanted = steps(target, dim);
      auto done = steps(now_.placements, dim);
      const auto position = done.size();
      if (position < wanted.size() && wanted[position].axis == axis &&
          std::equal(done.begin(), done.end(), wanted.begin())) {
        reduce_scatter(wanted[position], dim, op);
        now_.placements[axis] = target[axis];
        return;
      }
    }
    local_ = local_.clone(at::MemoryFormat::Contiguous);
    group(axis).all_reduce(local_, op);
    now_.placements[axis] = Replicate{};
  }

  void reduce_scatter(const ShardStep& step, int64_t dim, const ReduceOp& op) {
    const auto rows = local_.movedim(dim, 0);
    const auto input = padded_parts(rows, step);
    auto output = at::empty(input.sizes().slice(1), input.options());
    group(step.axis).reduce_scatter(output, input, op);
    const auto length = step.length(rows.size(0), coordinate_[step.axis]);
    local_ = output.narrow(0, 0, length).movedim(0, dim).contiguous();
  }

  /// Undoes steps of `dim`, the last one first, until the rest are the first steps of the target.
  void unshard(int64_t dim, const std::vector<Placement>& target) {
    const auto wanted = steps(target, dim);
    auto done = steps(now_.placements, dim);
    const auto is_prefix = [&] {
      return done.size() <= wanted.size() && std::equal(done.begin(), done.end(), wanted.begin());
    };
    while (!is_prefix()) {
      const auto step = done.back();
      if (!move_shard(done, dim, target)) {
        gather(step, dim, length_before_last(done, dim));
        now_.placements[step.axis] = Replicate{};
      }
      done.pop_back();
    }
  }

  void gather(const ShardStep& step, int64_t dim, int64_t length) {
    const auto longest = step.length(length, 0);
    const auto input = padded_rows(local_, dim, longest);
    auto sizes = input.sizes().vec();
    sizes.insert(sizes.begin(), step.num_ranks);
    auto output = at::empty(sizes, input.options());
    group(step.axis).all_gather(output, input);
    const auto rows =
        step.is_even(length) ? output.flatten(0, 1) : put_together(output.unbind(0), step, length);
    local_ = rows.movedim(0, dim).contiguous();
  }

  /// Moves a shard to another dim by one all-to-all, if the axis that divided `dim` last is the
  /// target's next step on that other dim. Returns true if it moved the shard.
  bool move_shard(
      const std::vector<ShardStep>& done, int64_t dim, const std::vector<Placement>& target) {
    const auto from = done.back();
    const auto to_dim = shard_dim(target[from.axis]);
    if (to_dim < 0 || to_dim == dim) {
      return false;
    }
    const auto wanted = steps(target, to_dim);
    const auto there = steps(now_.placements, to_dim);
    if (there.size() >= wanted.size() || wanted[there.size()].axis != from.axis ||
        !std::equal(there.begin(), there.end(), wanted.begin())) {
      return false;
    }
    const auto to = wanted[there.size()];
    const auto length = length_before_last(done, dim);
    const auto longest = from.length(length, 0);
    // Sends each rank its part of `to_dim` within our part of `dim`:
    // [ranks, their part of to_dim, our part of dim, ...].
    auto rows = padded_rows(local_, dim, longest);
    const auto to_dim_in_rows = to_dim < dim ? to_dim + 1 : to_dim;
    const auto to_length = rows.size(to_dim_in_rows);
    const auto input = padded_parts(rows.movedim(to_dim_in_rows, 0), to);
    auto output = at::empty_like(input);
    group(from.axis).all_to_all(output, input);
    std::vector<at::Tensor> pieces;
    for (const auto& received : output.unbind(0)) {
      pieces.push_back(received.movedim(1, 0));
    }
    rows = put_together(pieces, from, length);
    rows = rows.narrow(1, 0, to.length(to_length, coordinate_[to.axis]));
    local_ = rows.movedim(1, to_dim_in_rows).movedim(0, dim).contiguous();
    now_.placements[from.axis] = target[from.axis];
    return true;
  }

  /// Applies the target's missing steps. Needs no communication.
  void shard(int64_t dim, const std::vector<Placement>& target) {
    const auto wanted = steps(target, dim);
    for (auto i = steps(now_.placements, dim).size(); i < wanted.size(); ++i) {
      const auto& step = wanted[i];
      // A copy, so that the part does not keep the whole in memory.
      local_ = take(local_.movedim(dim, 0), step, coordinate_[step.axis])
                   .movedim(0, dim)
                   .clone(at::MemoryFormat::Contiguous);
      now_.placements[step.axis] = target[step.axis];
    }
  }

  void scatter(const ShardStep& step, int64_t dim) {
    const auto rows = local_.movedim(dim, 0);
    const auto parts = padded_parts(rows, step);
    auto part = at::empty(parts.sizes().slice(1), parts.options());
    group(step.axis).scatter(part, parts, 0);
    const auto length = step.length(rows.size(0), coordinate_[step.axis]);
    local_ = part.narrow(0, 0, length).movedim(0, dim).contiguous();
  }

  /// Turns a replicated value into this rank's term of a reduction that gives the value back.
  void make_partial(int64_t axis, const Partial& partial) {
    const bool first = coordinate_[axis] == 0;
    switch (partial.op.kind()) {
      case ReduceOp::Sum:
        local_ = first ? local_ : at::zeros_like(local_);
        break;
      case ReduceOp::PremulSum:
        local_ = first ? local_ / partial.op.factor() : at::zeros_like(local_);
        break;
      case ReduceOp::Product:
        local_ = first ? local_ : at::ones_like(local_);
        break;
      case ReduceOp::Avg:
      case ReduceOp::Max:
      case ReduceOp::Min:
        break;
    }
    now_.placements[axis] = partial;
  }

  at::Tensor local_;
  TensorSpec now_;
  const std::vector<int64_t> coordinate_;
};

} // namespace

at::Tensor redistribute(
    at::Tensor local, const TensorSpec& spec, const std::vector<Placement>& target) {
  at::NoGradGuard no_grad;
  return Redistribution(std::move(local), spec).move_to(target);
}

namespace {

/// Throws ValueError if the ranks have tensors of different sizes or dtypes. Without this check,
/// padding would hide the difference.
void check_same_on_all(const at::Tensor& tensor, const DeviceMesh& mesh) {
  constexpr int64_t kMaxDims = 16;
  TORCH_CHECK_VALUE(tensor.dim() <= kMaxDims, "[distribute_tensor] more than 16 dims");
  std::vector<int64_t> print(kMaxDims + 2, -1);
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), print.begin());
  print[kMaxDims] = static_cast<int64_t>(tensor.scalar_type());
  print[kMaxDims + 1] = tensor.dim();
  const auto mine = // names the CPU because MetaInit changes the default device
      at::tensor(print, at::device(at::kCPU).dtype(at::kLong)).to(tensor.device());
  std::string difference;
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) { // all axes, so that no peer is left waiting
    const auto group = mesh.get_group(axis);
    auto all = at::empty({group.size(), mine.numel()}, mine.options());
    group.all_gather(all, mine);
    for (int other = 0; other < group.size(); ++other) {
      const auto theirs = all[other].cpu();
      const auto* values = theirs.const_data_ptr<int64_t>();
      if (!theirs.equal(mine.cpu())) {
        difference = c10::str(
            "rank ", group.ranks()[other], " ", static_cast<at::ScalarType>(values[kMaxDims]),
            c10::IntArrayRef(values, values[kMaxDims + 1]));
      }
    }
  }
  TORCH_CHECK_VALUE(
      difference.empty(), "[distribute_tensor] the ranks bring different tensors: ", difference,
      ", this rank ", tensor.scalar_type(), tensor.sizes());
}

} // namespace

at::Tensor distribute(const at::Tensor& full, const TensorSpec& target) {
  at::NoGradGuard no_grad;
  check_same_on_all(full, target.mesh);
  TensorSpec replicated = target;
  replicated.placements.assign(target.placements.size(), Replicate{});
  // Broadcasts write into a copy, not into the caller's tensor.
  return Redistribution(full.detach().clone(at::MemoryFormat::Contiguous), replicated)
      .distribute_to(target.placements);
}

} // namespace fsdp::detail
