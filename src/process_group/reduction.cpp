#include "process_group/reduction.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace fsdp::detail {

namespace {

// Small enough that the accumulator stays in a core's cache between inputs.
constexpr int64_t kCpuBlock = 1 << 15;

at::ScalarType accumulation_type(at::ScalarType type) {
  return at::isReducedFloatingType(type) ? at::kFloat : type;
}

void accumulate(at::Tensor& sum, const at::Tensor& input, const ReduceOp& op) {
  switch (op.kind()) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
      sum.add_(input);
      break;
    case ReduceOp::PremulSum:
      sum.add_(input, op.factor());
      break;
    case ReduceOp::Product:
      sum.mul_(input);
      break;
    case ReduceOp::Max:
      at::maximum_out(sum, sum, input);
      break;
    case ReduceOp::Min:
      at::minimum_out(sum, sum, input);
      break;
  }
}

void reduce_block(
    const at::Tensor& output, const std::vector<at::Tensor>& inputs, const ReduceOp& op) {
  const auto type = accumulation_type(output.scalar_type());
  const bool is_later_input = std::any_of(inputs.begin() + 1, inputs.end(), [&](const auto& input) {
    return input.const_data_ptr() == output.const_data_ptr();
  });
  const bool in_place = type == output.scalar_type() && !is_later_input;
  auto sum = in_place ? output : at::empty_like(output, output.options().dtype(type));
  if (sum.const_data_ptr() != inputs[0].const_data_ptr()) {
    sum.copy_(inputs[0]);
  }
  if (op.kind() == ReduceOp::PremulSum) {
    sum.mul_(op.factor());
  }
  for (size_t i = 1; i < inputs.size(); ++i) {
    accumulate(sum, in_place ? inputs[i] : inputs[i].to(type), op);
  }
  if (op.kind() == ReduceOp::Avg) {
    divide_sum(sum, static_cast<int64_t>(inputs.size()));
  }
  if (!in_place) {
    output.copy_(sum);
  }
}

} // namespace

void divide_sum(const at::Tensor& sum, int64_t count) {
  if (at::isIntegralType(sum.scalar_type(), /*includeBool=*/false)) {
    sum.div_(count, "trunc");
  } else {
    sum.div_(count);
  }
}

void reduce_in_order(
    const at::Tensor& output, const std::vector<at::Tensor>& inputs, const ReduceOp& op) {
  const int64_t numel = output.numel();
  const int64_t block = output.is_cpu() ? kCpuBlock : numel;
  for (int64_t start = 0; start < numel; start += block) {
    const int64_t length = std::min(block, numel - start);
    std::vector<at::Tensor> parts;
    parts.reserve(inputs.size());
    for (const auto& input : inputs) {
      parts.push_back(input.narrow(0, start, length));
    }
    reduce_block(output.narrow(0, start, length), parts, op);
  }
}

} // namespace fsdp::detail
