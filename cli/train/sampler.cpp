#include "cli/train/sampler.h"

#include <algorithm>
#include <vector>

#include <fsdp/redistribute.h>

#include "cli/train/token_choice.h"

namespace fsdp::cli {

namespace {

constexpr int64_t kBytes = 256; // the tokens that stand for bytes

torch::Tensor scores_behind(Transformer& model, const torch::Tensor& tokens) {
  auto scores = model(tokens.unsqueeze(0)).select(0, 0).select(0, -1);
  if (model->tensor_mesh) {
    scores = redistribute(scores, *model->tensor_mesh, Shard{0}, Replicate{});
  }
  return scores.narrow(0, 0, kBytes).to(torch::kCPU, torch::kFloat);
}

} // namespace

std::string sample(Transformer& model, const std::string& prompt, const SampleOptions& options) {
  const torch::NoGradGuard no_grad;
  TokenChoice choose({.seed = options.seed});
  std::vector<int64_t> tokens;
  for (const char c : prompt.empty() ? "\n" : prompt) { // the model needs at least one token
    tokens.push_back(static_cast<unsigned char>(c));
  }
  for (int64_t i = 0; i < options.count && !options.stop(); ++i) {
    // A rank whose text is not wanted only takes part in the collectives: one token is enough.
    const auto most = options.keeps_text ? options.context : 1;
    const auto length = std::min(most, std::ssize(tokens));
    const auto last = torch::tensor(std::vector<int64_t>(tokens.end() - length, tokens.end()));
    tokens.push_back(choose(scores_behind(model, last.to(options.device))));
  }
  return {tokens.begin() + (prompt.empty() ? 1 : 0), tokens.end()};
}

} // namespace fsdp::cli
