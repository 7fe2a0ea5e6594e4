#include "cli/train/loss.h"

#include <torch/torch.h>

#include <fsdp/parallel_cross_entropy.h>

#include "cli/train/token_source.h"

namespace fsdp::cli {

torch::Tensor loss_sum(Transformer& model, const torch::Tensor& rows, bool have_flags) {
  constexpr int64_t kIgnored = -100;
  const auto time = rows.size(1) - 1;
  auto inputs = rows.narrow(1, 0, time);
  auto targets = rows.narrow(1, 1, time);
  torch::Tensor documents;
  if (have_flags) {
    const auto begins = inputs.bitwise_and(kBegins).ne(0);
    if (begins.any().item<bool>()) {
      documents = begins.cumsum(1);
    }
    inputs = inputs.bitwise_and(kTokenNumber);
    targets = targets.bitwise_and(kTokenNumber)
                  .masked_fill(targets.bitwise_and(kIsGiven).ne(0), kIgnored);
  }
  const auto outputs = documents.defined() ? model(inputs, documents) : model(inputs);
  const auto scores = outputs.flatten(0, 1).to(torch::kFloat);
  targets = targets.reshape({-1});
  return model->tensor_mesh
             ? parallel_cross_entropy(
                   scores, targets, *model->tensor_mesh, {.reduction = at::Reduction::Sum})
             : at::cross_entropy_loss(scores, targets, {}, at::Reduction::Sum, kIgnored);
}

} // namespace fsdp::cli
