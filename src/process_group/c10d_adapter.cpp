#include "process_group/c10d_adapter.h"

#include <utility>

#include "process_group/gather_plan.h"

namespace fsdp::detail {

namespace {

c10d::ReduceOp to_c10d(const ReduceOp& op) {
  switch (op.kind()) {
    case ReduceOp::Sum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::Avg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::Max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::Min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::Product:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::PremulSum: {
      // Built by hand: the name of c10d's factory function depends on the version.
      c10d::ReduceOp premul_sum;
      premul_sum.op_ = c10d::ReduceOp::PREMUL_SUM;
      premul_sum.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(op.factor());
      return premul_sum;
    }
  }
  TORCH_INTERNAL_ASSERT(false);
}

ReduceOp from_c10d(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::Sum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::Avg;
    case c10d::ReduceOp::MAX:
      return ReduceOp::Max;
    case c10d::ReduceOp::MIN:
      return ReduceOp::Min;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::Product;
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto& factor = static_cast<const c10d::NCCLPreMulSumSupplement&>(*op.supplement_);
      return ReduceOp::premul_sum(
          factor.tensor_factor.defined() ? factor.tensor_factor.item<double>()
                                         : factor.double_factor);
    }
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "bitwise reductions are not supported");
  }
}

/// Gathers each part of the plan by an all-gather of its own, all in one launch.
c10::intrusive_ptr<c10d::Work> gather_parts(
    c10d::Backend& backend,
    const at::Tensor& output,
    const at::Tensor& input,
    const GatherPlan& plan) {
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> inputs;
  for (const auto& part : plan.parts) {
    if (part.numel > 0) {
      outputs.push_back(output.narrow(0, part.out, part.numel * plan.ranks));
      inputs.push_back(input.narrow(0, part.in, part.numel));
    }
  }
  return backend.allgather_into_tensor_coalesced(outputs, inputs, {});
}

at::Tensor single(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "one tensor per rank, not ", tensors.size());
  return tensors.front();
}

} // namespace

c10::intrusive_ptr<c10d::Work> issue(c10d::Backend& backend, const CollectiveCall& call) {
  if (auto* local = dynamic_cast<LocalBackend*>(&backend)) {
    return local->issue_call(call);
  }
  // Tensors are flattened, because some backends compare shapes although only the
  // number of elements matters. An all-to-all with splits keeps its rows: the
  // splits are lengths along dim 0.
  const bool flat = call.out_splits.empty() && call.in_splits.empty();
  const auto flattened = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !flat) {
      return tensor;
    }
    // gloo and nccl have no complex numbers. Copies and sums of them are those of their parts.
    const bool in_parts = tensor.is_complex() && !call.plan && call.op.kind() != ReduceOp::Product;
    return (in_parts ? at::view_as_real(tensor) : tensor).view(-1);
  };
  auto output = flattened(call.output);
  auto input = flattened(call.input);
  std::vector<at::Tensor> outputs{output};
  switch (call.kind) {
    case CollectiveKind::AllGather:
      if (call.plan) {
        return gather_parts(backend, output, input, *call.plan);
      }
      return backend._allgather_base(output, input, {});
    case CollectiveKind::ReduceScatter: {
      c10d::ReduceScatterOptions options;
      options.reduceOp = to_c10d(call.op);
      return backend._reduce_scatter_base(output, input, options);
    }
    case CollectiveKind::AllReduce: {
      c10d::AllreduceOptions options;
      options.reduceOp = to_c10d(call.op);
      return backend.allreduce(outputs, options);
    }
    case CollectiveKind::Broadcast: {
      c10d::BroadcastOptions options;
      options.rootRank = call.root;
      return backend.broadcast(outputs, options);
    }
    case CollectiveKind::Scatter: {
      c10d::ScatterOptions options;
      options.rootRank = call.root;
      std::vector<std::vector<at::Tensor>> inputs;
      if (backend.getRank() == call.root) {
        inputs.push_back(input.view({backend.getSize(), output.numel()}).unbind(0));
      }
      return backend.scatter(outputs, inputs, options);
    }
    case CollectiveKind::AllToAll: {
      auto out_splits = call.out_splits;
      auto in_splits = call.in_splits;
      return backend.alltoall_base(output, input, out_splits, in_splits, {});
    }
    case CollectiveKind::Barrier:
      return backend.barrier({});
  }
  TORCH_INTERNAL_ASSERT(false);
}

bool scales_natively(const c10d::Backend& backend) {
  return dynamic_cast<const LocalBackend*>(&backend) != nullptr ||
         backend.getBackendName() == "nccl";
}

c10::intrusive_ptr<c10d::Work> LocalBackend::start(CollectiveCall call) {
  check_call(call, getRank(), getSize());
  return issue_call(std::move(call));
}

c10::intrusive_ptr<c10d::Work> LocalBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) {
  return start({.kind = CollectiveKind::AllGather, .output = output, .input = input});
}

c10::intrusive_ptr<c10d::Work> LocalBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return start(
      {.kind = CollectiveKind::ReduceScatter,
       .output = output,
       .input = input,
       .op = from_c10d(options.reduceOp)});
}

c10::intrusive_ptr<c10d::Work> LocalBackend::allreduce(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  return start(
      {.kind = CollectiveKind::AllReduce,
       .output = single(tensors),
       .op = from_c10d(options.reduceOp)});
}

c10::intrusive_ptr<c10d::Work> LocalBackend::broadcast(
    std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  return start(
      {.kind = CollectiveKind::Broadcast,
       .output = single(tensors),
       .root = static_cast<int>(options.rootRank)});
}

c10::intrusive_ptr<c10d::Work> LocalBackend::scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ScatterOptions& options) {
  return start(
      {.kind = CollectiveKind::Scatter,
       .output = single(outputs),
       .input = inputs.empty() ? at::Tensor() : at::stack(inputs.front()),
       .root = static_cast<int>(options.rootRank)});
}

c10::intrusive_ptr<c10d::Work> LocalBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& out_splits,
    std::vector<int64_t>& in_splits,
    const c10d::AllToAllOptions&) {
  return start(
      {.kind = CollectiveKind::AllToAll,
       .output = output,
       .input = input,
       .out_splits = out_splits,
       .in_splits = in_splits});
}

c10::intrusive_ptr<c10d::Work> LocalBackend::barrier(const c10d::BarrierOptions&) {
  return start({.kind = CollectiveKind::Barrier});
}

} // namespace fsdp::detail
