#include <fsdp/redistribute.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <set>
#include <utility>

#include "layout/shard_layout.h"
#include "parallel/conversion.h"
#include "parallel/local_move.h"
#include "process_group/by_group.h"
#include "state/autograd_hooks.h"

namespace fsdp::detail {

namespace {

namespace autograd = torch::autograd;
using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

// ------------------------------------------------------------ How long the whole is

// All ranks of a group add the same dims at the same point of the program, so they agree on them.
ByGroup<std::set<int64_t>> uneven_dims;

bool is_divided_unevenly(const ProcessGroup& group, int64_t dim) {
  return uneven_dims.with(group, [&](const auto& dims) { return dims.contains(dim); });
}

int64_t whole_length(
    const at::Tensor& local, int64_t dim, const LocalMove& move, const MoveLabel& label) {
  const auto group = move.mesh.get_group();
  const auto size = group.size();
  if (!is_divided_unevenly(group, dim)) {
    return local.size(dim) * size;
  }
  const auto mine = at::full({1}, local.size(dim), local.options().dtype(at::kLong));
  auto all = at::empty({size}, mine.options());
  const ScopedModuleLabel for_module(label.module);
  group.all_gather(all, mine);
  const auto lengths = all.cpu();
  const auto* length = lengths.const_data_ptr<int64_t>();
  int64_t whole = 0;
  for (int rank = 0; rank < size; ++rank) {
    whole += length[rank];
  }
  for (int rank = 0; rank < size; ++rank) {
    TORCH_CHECK_VALUE(
        length[rank] == chunk_run(whole, size, rank).length, label.what, ": along dim ", dim,
        " the ranks of ", axis_text(move.mesh), " have ", at::IntArrayRef(length, size),
        ", which are not the chunks of ", whole);
  }
  return whole;
}

/// Returns the sizes of the whole tensor. The placements of `move` are normalized.
std::vector<int64_t> whole_sizes(
    const at::Tensor& local,
    const LocalMove& move,
    const MoveLabel& label,
    const std::optional<std::vector<int64_t>>& given) {
  auto sizes = local.sizes().vec();
  const auto dim = shard_dim(move.from);
  if (!given) {
    if (dim >= 0) {
      sizes[dim] = whole_length(local, dim, move, label);
    }
    return sizes;
  }
  const auto expected =
      local_sizes(*given, {move.from}, move.mesh.shape(), move.mesh.get_coordinate());
  TORCH_CHECK_VALUE(
      local.sizes() == at::IntArrayRef(expected), label.what, " has sizes ", local.sizes(),
      ", but of ", at::IntArrayRef(*given), " placed ", to_string(move.from), " on ",
      axis_text(move.mesh), " this rank holds ", at::IntArrayRef(expected));
  return *given;
}

// ------------------------------------------------------------ Checks

void check_placement(const Placement& placement, const LocalMove& move, const MoveLabel& label) {
  TORCH_CHECK_VALUE(
      can_move(placement), label.what, " cannot be placed ", to_string(placement), " on ",
      axis_text(move.mesh), ": take Replicate, Shard or Partial (a sum)");
}

/// Returns the move with non-negative dims and with the gradient's placement filled in. Throws
/// ValueError if the move is invalid.
LocalMove checked(const at::Tensor& local, LocalMove move, const MoveLabel& label) {
  TORCH_CHECK_VALUE(
      move.mesh.ndim() == 1, label.what, ": needs a mesh of one axis, not ", move.mesh.str(),
      "; take a slice of it");
  TORCH_CHECK_VALUE(local.defined(), label.what, " is undefined");
  for (auto* placement : {&move.from, &move.to}) {
    check_placement(*placement, move, label);
    if (auto* shard = std::get_if<Shard>(placement)) {
      TORCH_CHECK_VALUE(
          shard->dim >= -local.dim() && shard->dim < local.dim(), label.what, " has sizes ",
          local.sizes(), ", which ", axis_text(move.mesh), " cannot divide as ",
          to_string(*placement), " says");
      shard->dim += shard->dim < 0 ? local.dim() : 0;
    }
  }
  const bool partial = std::holds_alternative<Partial>(move.to);
  const Placement by_default = partial ? Placement(Replicate{}) : move.to;
  TORCH_CHECK_VALUE(
      !move.grad || *move.grad == by_default ||
          (std::holds_alternative<Replicate>(move.to) && *move.grad == Placement(Partial{})),
      label.what, ": a gradient that lies ", move.grad ? to_string(*move.grad) : "",
      " does not go with a result that lies ", to_string(move.to));
  move.grad = move.grad.value_or(by_default);
  return move;
}

bool is_no_op(const LocalMove& move) {
  return move.mesh.size() == 1 || (move.from == move.to && *move.grad != Placement(Partial{}));
}

/// Also records an uneven division by the move. Gradients are placed like values, except that the
/// gradient of a Partial value is replicated: every term of a sum has the gradient of the sum.
Conversion conversion_of(
    const LocalMove& move, std::vector<int64_t> sizes, const MoveLabel& label) {
  if (const auto dim = shard_dim(move.to); dim >= 0) {
    record_uneven_division(move.mesh, dim, sizes[dim]);
  }
  const bool partial = std::holds_alternative<Partial>(move.from);
  const Placement grad_to = partial ? Placement(Replicate{}) : move.from;
  return {move.mesh, std::move(sizes), {move.from, move.to}, {*move.grad, grad_to}, label.module};
}

// ------------------------------------------------------------ Inputs

/// See Note [Inputs that several modules share].
struct LastInput {
  WeakTensor source;
  int64_t source_version;
  const c10d::Backend* group; // only compared: a mesh would keep its groups alive
  WeakNodePtr node;
};
thread_local std::optional<LastInput> last_input;

/// Returns the node of the last input if `source` is that input, unchanged, on the same group.
/// Otherwise returns null.
NodePtr find_last(const at::Tensor& source, const LocalMove& move) {
  const bool is_last = last_input &&
                       last_input->source.lock().get() == source.unsafeGetTensorImpl() &&
                       last_input->source_version == source._version() &&
                       last_input->group == move.mesh.get_group().backend().get();
  return is_last ? last_input->node.lock() : NodePtr();
}

/// Returns the node that gathered this input for the enclosing module, if gradients may bypass it.
/// Otherwise returns null.
ConversionNode* gathered_by(const at::Tensor& input, const LocalMove& move) {
  auto* node = dynamic_cast<ConversionNode*>(input.grad_fn().get());
  const bool fits = node && node->conversion().of_input && node->conversion().mesh == move.mesh &&
                    move.from == Placement(Replicate{}) && move.to == Placement(Replicate{}) &&
                    node->conversion().grad.from == Placement(Replicate{}) &&
                    move.grad == Placement(Partial{});
  // Hooks on the gathered tensor must see its whole gradient.
  return fits && node->tensor_pre_hooks().empty() && node->pre_hooks().empty() &&
                 node->retains_grad_hooks().empty()
             ? node
             : nullptr;
}

} // namespace

at::Tensor move_local(
    const at::Tensor& local,
    const LocalMove& asked,
    const MoveLabel& label,
    const std::optional<std::vector<int64_t>>& sizes) {
  const auto move = checked(local, asked, label);
  if (is_no_op(move)) {
    return local;
  }
  return convert(local, conversion_of(move, whole_sizes(local, move, label, sizes), label));
}

at::Tensor move_input(const at::Tensor& local, const LocalMove& asked, const MoveLabel& label) {
  const auto move = checked(local, asked, label);
  if (is_no_op(move)) {
    return local;
  }
  // Moves values at every call. An earlier result cannot be reused, because it may still be in
  // memory on some ranks only, and then collectives would not match.
  const bool only_grads = move.from == move.to;
  if (only_grads && !needs_grad(local)) {
    return local;
  }
  if (auto node = only_grads ? find_last(local, move) : NodePtr()) {
    return view_behind(local, node);
  }
  const auto* gathered = needs_grad(local) ? gathered_by(local, move) : nullptr;
  auto conversion = conversion_of(move, whole_sizes(local, move, label, {}), label);
  conversion.of_input = true;
  if (gathered) {
    conversion.grad.to = gathered->conversion().grad.to;
  }
  const auto node = node_of(conversion, gathered ? gathered->next_edges() : edges_of(local));
  auto result = convert_with_node(local, conversion, node);
  if (only_grads) {
    last_input.emplace(LastInput{
        .source = WeakTensor(local.getIntrusivePtr()),
        .source_version = local._version(),
        .group = move.mesh.get_group().backend().get(),
        .node = weak_node(node)});
  }
  return result;
}

void record_uneven_division(const DeviceMesh& mesh, int64_t dim, int64_t length) {
  if (length % mesh.size() != 0) {
    uneven_dims.with(mesh.get_group(), [&](auto& dims) { dims.insert(dim); });
  }
}

bool can_move(const Placement& placement) {
  const auto* partial = std::get_if<Partial>(&placement);
  return !std::holds_alternative<StridedShard>(placement) &&
         !std::holds_alternative<BlockShard>(placement) &&
         (!partial || partial->op.kind() == ReduceOp::Sum);
}

std::string axis_text(const DeviceMesh& mesh) {
  return mesh.names().empty() ? "the one axis of " + mesh.str()
                              : "mesh axis '" + mesh.names().front() + "' of " + mesh.str();
}

} // namespace fsdp::detail

namespace fsdp {

at::Tensor redistribute(
    const at::Tensor& local,
    const DeviceMesh& mesh,
    const Placement& from,
    const Placement& to,
    const RedistributeOptions& options) {
  return detail::move_local(
      local, {mesh, from, to, options.grad_placement}, {.what = "[redistribute] the tensor"},
      options.sizes);
}

} // namespace fsdp
