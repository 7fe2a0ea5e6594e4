#include "process_group/collective_call.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <sstream>

#include "process_group/gather_plan.h"

namespace fsdp::detail {

namespace {

std::string describe(const at::Tensor& tensor) {
  std::ostringstream out;
  out << tensor.scalar_type() << tensor.sizes();
  if (!tensor.is_cpu()) {
    out << " on " << tensor.device();
  }
  return out.str();
}

void check_tensor(const CollectiveCall& call, const at::Tensor& tensor, const char* role) {
  TORCH_CHECK_VALUE(
      tensor.defined(), "[", to_string(call.kind), "] ", role, " is an undefined tensor");
  TORCH_CHECK_VALUE(
      tensor.is_contiguous(), "[", to_string(call.kind), "] ", role, " ", describe(tensor),
      " is not contiguous; pass tensor.contiguous()");
  TORCH_CHECK_VALUE(
      !tensor.is_conj() && !tensor.is_neg(), "[", to_string(call.kind), "] ", role, " ",
      describe(tensor), " is a lazy conjugate or negative; pass resolve_conj() or resolve_neg()");
}

void check_overlap(const CollectiveCall& call, int rank) {
  const auto* in = static_cast<const char*>(call.input.const_data_ptr());
  const auto* out = static_cast<const char*>(call.output.const_data_ptr());
  const auto in_bytes = static_cast<int64_t>(call.input.nbytes());
  const auto out_bytes = static_cast<int64_t>(call.output.nbytes());
  if (in + in_bytes <= out || out + out_bytes <= in) {
    return;
  }
  const bool in_place =
      (call.kind == CollectiveKind::AllGather && in == out + rank * in_bytes) ||
      (call.kind == CollectiveKind::ReduceScatter && out == in + rank * out_bytes);
  TORCH_CHECK_VALUE(
      in_place, "[", to_string(call.kind), "] input ", describe(call.input), " and output ",
      describe(call.output), " overlap in memory");
}

void check_pair(const CollectiveCall& call) {
  TORCH_CHECK_VALUE(
      call.input.scalar_type() == call.output.scalar_type() &&
          call.input.device() == call.output.device(),
      "[", to_string(call.kind), "] input ", describe(call.input), " and output ",
      describe(call.output), " must have one dtype and device");
}

void check_reducible(const CollectiveCall& call) {
  const auto dtype = call.output.scalar_type();
  const auto kind = call.op.kind();
  if (kind == ReduceOp::PremulSum) {
    TORCH_CHECK_VALUE(
        at::isFloatingType(dtype) || at::isComplexType(dtype), "[", to_string(call.kind),
        "] premul_sum needs a floating point tensor, not ", dtype);
  }
  TORCH_CHECK_VALUE(
      !at::isComplexType(dtype) || (kind != ReduceOp::Max && kind != ReduceOp::Min), "[",
      to_string(call.kind), "] complex numbers have no ", call.op.str());
  TORCH_CHECK_VALUE(
      dtype != at::kBool || kind != ReduceOp::Avg, "[", to_string(call.kind),
      "] booleans have no avg; use max or min");
}

void check_splits(
    const at::Tensor& tensor, const std::vector<int64_t>& splits, int size, const char* role) {
  if (splits.empty()) {
    TORCH_CHECK_VALUE(
        tensor.numel() % size == 0, "[all_to_all] ", role, " ", describe(tensor),
        " does not split evenly over ", size, " ranks; give the splits");
    return;
  }
  const auto total = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  TORCH_CHECK_VALUE(
      std::all_of(splits.begin(), splits.end(), [](auto split) { return split >= 0; }),
      "[all_to_all] the splits ", c10::IntArrayRef(splits), " of the ", role,
      " are not all lengths");
  TORCH_CHECK_VALUE(
      splits.size() == static_cast<size_t>(size) && tensor.dim() > 0 && total == tensor.size(0),
      "[all_to_all] ", role, " ", describe(tensor), " needs ", size,
      " splits that add up to its dim 0, not ", c10::IntArrayRef(splits));
}

} // namespace

const char* to_string(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::AllGather:
      return "all_gather";
    case CollectiveKind::ReduceScatter:
      return "reduce_scatter";
    case CollectiveKind::AllReduce:
      return "all_reduce";
    case CollectiveKind::Broadcast:
      return "broadcast";
    case CollectiveKind::Scatter:
      return "scatter";
    case CollectiveKind::AllToAll:
      return "all_to_all";
    case CollectiveKind::Barrier:
      return "barrier";
  }
  return "?";
}

std::string CollectiveCall::str() const {
  std::ostringstream out;
  out << to_string(kind) << (purpose ? " " + purpose->text + " " : "") << "(";
  const char* separator = "";
  if (output.defined()) {
    out << (input.defined() ? "out " : "") << describe(output);
    separator = ", ";
  }
  if (input.defined()) {
    out << separator << "in " << describe(input);
  }
  if (!out_splits.empty() || !in_splits.empty()) {
    out << ", splits out " << c10::IntArrayRef(out_splits) << " in " << c10::IntArrayRef(in_splits);
  }
  if (kind == CollectiveKind::AllReduce || kind == CollectiveKind::ReduceScatter) {
    out << ", " << asked_op.value_or(op).str();
  }
  if (kind == CollectiveKind::Broadcast || kind == CollectiveKind::Scatter) {
    out << ", root " << root;
  }
  out << ")";
  return out.str();
}

int64_t CollectiveCall::bytes() const {
  if (plan) {
    return static_cast<int64_t>(input.nbytes()) * plan->ranks;
  }
  const auto size_of = [](const at::Tensor& tensor) {
    return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
  };
  return std::max(size_of(output), size_of(input));
}

void check_call(const CollectiveCall& call, int rank, int size) {
  if (call.kind == CollectiveKind::Barrier) {
    return;
  }
  check_tensor(call, call.output, "output");
  if (call.input.defined()) {
    check_tensor(call, call.input, "input");
    check_pair(call);
    if (!call.input.is_meta()) {
      check_overlap(call, rank);
    }
  }
  const auto in_numel = call.input.defined() ? call.input.numel() : 0;
  const auto out_numel = call.output.numel();
  switch (call.kind) {
    case CollectiveKind::AllGather:
      check_tensor(call, call.input, "input");
      if (call.plan) {
        TORCH_INTERNAL_ASSERT(
            call.plan->ranks == size && call.plan->in_numel == in_numel &&
            call.plan->out_numel == out_numel);
        break;
      }
      TORCH_CHECK_VALUE(
          out_numel == in_numel * size, "[all_gather] output ", describe(call.output),
          " must hold ", size, " times the input ", describe(call.input));
      break;
    case CollectiveKind::ReduceScatter:
      check_tensor(call, call.input, "input");
      TORCH_CHECK_VALUE(
          in_numel == out_numel * size, "[reduce_scatter] input ", describe(call.input),
          " must hold ", size, " times the output ", describe(call.output));
      check_reducible(call);
      break;
    case CollectiveKind::AllReduce:
      check_reducible(call);
      break;
    case CollectiveKind::Scatter:
      TORCH_CHECK_VALUE(
          !call.input.defined() || in_numel == out_numel * size, "[scatter] input ",
          describe(call.input), " must hold ", size, " times the output ", describe(call.output));
      [[fallthrough]];
    case CollectiveKind::Broadcast:
      TORCH_CHECK_VALUE(
          call.root >= 0 && call.root < size, "[", to_string(call.kind), "] root ", call.root,
          " is not a rank of a group of ", size);
      break;
    case CollectiveKind::AllToAll:
      check_tensor(call, call.input, "input");
      check_splits(call.output, call.out_splits, size, "output");
      check_splits(call.input, call.in_splits, size, "input");
      break;
    case CollectiveKind::Barrier:
      break;
  }
}

} // namespace fsdp::detail
