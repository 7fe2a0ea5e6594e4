#include "cli/train/token_choice.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <tuple>

namespace fsdp::cli {

namespace {

constexpr double kGreedyBelow = 1e-6; // a division by less could overflow
constexpr int64_t kLikeliest = 1024;  // to sort all tokens takes much longer

} // namespace

TokenChoice::TokenChoice(const Options& options)
    : options_(options), generator_(at::make_generator<at::CPUGeneratorImpl>(options.seed)) {}

int64_t TokenChoice::operator()(const torch::Tensor& scores) {
  if (options_.temperature < kGreedyBelow) {
    return scores.argmax().item<int64_t>();
  }
  auto probabilities = torch::softmax(scores / options_.temperature, -1);
  if (options_.top_p < 1) {
    const auto vocab = probabilities.size(-1);
    auto [sorted, order] = probabilities.topk(std::min(kLikeliest, vocab));
    if (sorted.cumsum(-1)[-1].item<float>() < options_.top_p) { // they do not reach it
      std::tie(sorted, order) = probabilities.sort(/*dim=*/-1, /*descending=*/true);
    }
    // A token stays if those before it do not reach top_p. So the likeliest always stays.
    const auto before = sorted.cumsum(-1) - sorted;
    const auto kept = sorted.masked_fill(before.ge(options_.top_p), 0);
    probabilities = torch::zeros_like(probabilities).scatter(-1, order, kept);
  }
  return torch::multinomial(probabilities, 1, /*replacement=*/true, generator_).item<int64_t>();
}

} // namespace fsdp::cli
