#include <fsdp/parallel_cross_entropy.h>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <limits>
#include <utility>
#include <vector>

#include "parallel/local_move.h"

namespace fsdp {

namespace {

constexpr const char* kCrossEntropyTag = "[parallel_cross_entropy] ";

void check(
    const at::Tensor& logits,
    const at::Tensor& targets,
    const DeviceMesh& mesh,
    const ParallelCrossEntropyOptions& options) {
  TORCH_CHECK_VALUE(
      mesh.ndim() == 1, kCrossEntropyTag, "needs a mesh of one axis, not ", mesh.str(),
      "; take a slice of it");
  TORCH_CHECK_VALUE(
      logits.defined() && logits.dim() >= 1 && logits.is_floating_point(), kCrossEntropyTag,
      "the logits must be a floating point tensor of one dim or more");
  TORCH_CHECK_VALUE(
      targets.defined() && at::isIntegralType(targets.scalar_type(), /*includeBool=*/false),
      kCrossEntropyTag, "the targets must be class numbers; probabilities are not supported");
  auto expected = logits.sizes().vec();
  expected.erase(expected.begin() + (logits.dim() == 1 ? 0 : 1));
  TORCH_CHECK_VALUE(
      targets.sizes() == at::IntArrayRef(expected), kCrossEntropyTag, "logits of sizes ",
      logits.sizes(), " on ", detail::axis_text(mesh), " need targets of sizes ",
      at::IntArrayRef(expected), ", not ", targets.sizes());
  TORCH_CHECK_VALUE(
      options.label_smoothing >= 0 && options.label_smoothing <= 1, kCrossEntropyTag,
      "label_smoothing must be between 0 and 1, got ", options.label_smoothing);
}

/// Returns the largest logit of each row over all ranks, [rows], and the number of classes on the
/// first rank (0D). All ranks have that many classes, except for the last ones.
std::pair<at::Tensor, at::Tensor> maximum_and_chunk(
    const at::Tensor& logits, const ProcessGroup& group) {
  at::NoGradGuard no_grad; // to subtract a number from a row does not change its loss
  const auto num_rows = logits.size(0);
  auto both = at::full({num_rows + 1}, -std::numeric_limits<double>::infinity(), logits.options());
  if (logits.size(1) > 0) {
    both.narrow(0, 0, num_rows).copy_(logits.amax(1));
  }
  both[num_rows].fill_(logits.size(1));
  if (group.size() > 1) {
    group.all_reduce(both, ReduceOp::Max);
  }
  return {both.narrow(0, 0, num_rows), both[num_rows].to(at::kLong)};
}

/// Returns the loss of each row, [rows]. It is zero if the target is ignore_index.
at::Tensor row_losses(
    const at::Tensor& logits, // [rows, classes of this rank]
    const at::Tensor& targets,
    const DeviceMesh& mesh,
    const ParallelCrossEntropyOptions& options) {
  const auto [maximum, chunk] = maximum_and_chunk(logits, mesh.get_group());
  const auto kept = targets != options.ignore_index;
  const auto position = targets - chunk * mesh.get_local_rank();
  const auto is_here = kept & (position >= 0) & (position < logits.size(1));

  const auto shifted = logits - maximum.unsqueeze(1);
  auto target_logits = at::zeros_like(maximum);
  if (logits.size(1) > 0) {
    target_logits = shifted.gather(1, position.masked_fill(~is_here, 0).unsqueeze(1))
                        .squeeze(1)
                        .masked_fill(~is_here, 0);
  }
  std::vector<at::Tensor> terms{shifted.exp().sum(1), target_logits, is_here.to(logits.dtype())};
  if (options.label_smoothing > 0) {
    terms.push_back(shifted.sum(1));
    terms.push_back(at::full_like(maximum, logits.size(1)));
  }
  // Every rank computes the same loss from the sums.
  const auto sums = detail::move_local(
                        at::stack(terms), {mesh, Partial{}, Replicate{}},
                        {c10::str(kCrossEntropyTag, "the sums"), ""})
                        .unbind();
  at::_assert_async(
      ((sums[2] == 1) | ~kept).all(),
      c10::str(kCrossEntropyTag, "a target is none of the classes"));
  const auto log_sum = sums[0].log();
  auto losses = log_sum - sums[1];
  if (const auto smoothing = options.label_smoothing; smoothing > 0) {
    losses = (1 - smoothing) * losses + smoothing * (log_sum - sums[3] / sums[4]);
  }
  return losses.masked_fill(~kept, 0);
}

} // namespace

at::Tensor parallel_cross_entropy(
    const at::Tensor& local_logits,
    const at::Tensor& targets,
    const DeviceMesh& mesh,
    const ParallelCrossEntropyOptions& options) {
  check(local_logits, targets, mesh, options);
  const auto dtype = local_logits.scalar_type();
  const auto rows = local_logits.dim() == 1 ? local_logits.unsqueeze(0)
                                            : local_logits.movedim(1, -1).flatten(0, -2);
  const auto flat = targets.flatten().to(at::kLong);
  const auto losses = row_losses(rows.to(at::toOpMathType(dtype)), flat, mesh, options);
  switch (options.reduction) {
    case at::Reduction::None:
      return losses.view(targets.sizes()).to(dtype);
    case at::Reduction::Sum:
      return losses.sum().to(dtype);
    default:
      return (losses.sum() / (flat != options.ignore_index).sum()).to(dtype);
  }
}

} // namespace fsdp
