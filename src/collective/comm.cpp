#include "collective/comm.h"

#include <ATen/ATen.h>

#include "runtime/stream.h"

namespace fsdp {

at::Tensor AllGather::allocate(at::IntArrayRef sizes, at::TensorOptions options) {
  return at::empty(sizes, options);
}

at::Tensor ReduceScatter::allocate(at::IntArrayRef sizes, at::TensorOptions options) {
  return at::empty(sizes, options);
}

Work WideSumReduceScatter::operator()(
    at::Tensor& out, const at::Tensor& in, ProcessGroup& group, ReduceOp op, bool async_op) {
  const auto kind = op.kind();
  TORCH_CHECK_VALUE(
      kind == ReduceOp::Sum || kind == ReduceOp::Avg || kind == ReduceOp::PremulSum,
      "[WideSumReduceScatter] it can only add and average, not reduce by ", op.str());
  const at::NoGradGuard no_grad;
  const auto size = group.size();
  const auto sent = in.to(sent_dtype);
  auto received = at::empty_like(sent);
  auto work = group.all_to_all_async(received, sent);
  auto add = [out, received, op, size]() mutable {
    const at::NoGradGuard no_grad;
    at::sum_out(out, received.view({size, -1}), /*dim=*/0, /*keepdim=*/false, out.scalar_type());
    if (op.kind() == ReduceOp::Avg) {
      out.div_(size);
    } else if (op.kind() == ReduceOp::PremulSum) {
      out.mul_(op.factor());
    }
  };
  if (async_op && !detail::has_streams(out.device())) {
    work.then(std::move(add));
    return work;
  }
  work.wait(); // on an accelerator, the current stream waits
  add();
  return {};
}

namespace detail {

namespace {

// Ignores `async_op` and is always asynchronous: the caller waits before it reads the result.
struct DefaultAllGather : AllGather {
  Work operator()(
      at::Tensor& out, const at::Tensor& in, ProcessGroup& group, bool /*async_op*/) override {
    return group.all_gather_async(out, in);
  }
};

struct DefaultReduceScatter : ReduceScatter {
  Work operator()(
      at::Tensor& out,
      const at::Tensor& in,
      ProcessGroup& group,
      ReduceOp op,
      bool /*async_op*/) override {
    return group.reduce_scatter_async(out, in, op);
  }
};

template <class Default>
struct FromProcessGroup : Default {
  explicit FromProcessGroup(ProcessGroup process_group) : group(std::move(process_group)) {}
  at::Tensor allocate(at::IntArrayRef sizes, at::TensorOptions options) override {
    return group.allocate(c10::multiply_integers(sizes), options).view(sizes);
  }
  const ProcessGroup group;
};

} // namespace

void check_flat(
    const at::Tensor& flat, int64_t numel, at::ScalarType dtype, std::string_view function_name) {
  TORCH_CHECK_VALUE(
      flat.defined() && flat.dim() == 1 && flat.numel() == numel && flat.is_contiguous() &&
          flat.scalar_type() == dtype,
      "[fully_shard] ", function_name, " should leave a contiguous 1D tensor of ", numel,
      " elements of ", dtype, ", but left ",
      flat.defined() ? c10::str(flat.scalar_type(), flat.sizes()) : "none");
}

std::shared_ptr<AllGather> default_all_gather() {
  static const auto comm = std::make_shared<DefaultAllGather>();
  return comm;
}

std::shared_ptr<ReduceScatter> default_reduce_scatter() {
  static const auto comm = std::make_shared<DefaultReduceScatter>();
  return comm;
}

std::shared_ptr<AllGather> process_group_all_gather(ProcessGroup group) {
  return std::make_shared<FromProcessGroup<DefaultAllGather>>(std::move(group));
}

std::shared_ptr<ReduceScatter> process_group_reduce_scatter(ProcessGroup group) {
  return std::make_shared<FromProcessGroup<DefaultReduceScatter>>(std::move(group));
}

} // namespace detail
} // namespace fsdp
