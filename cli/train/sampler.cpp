#include "cli/train/sampler.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <vector>

#include <fsdp/redistribute.h>

namespace fsdp::cli {

namespace {

constexpr int64_t kBytes = 256;       // the tokens that stand for bytes
constexpr double kGreedyBelow = 1e-6; // the likeliest byte is taken: division could overflow

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
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  std::vector<int64_t> tokens;
  for (const char c : prompt.empty() ? "\n" : prompt) { // the model needs at least one token
    tokens.push_back(static_cast<unsigned char>(c));
  }
  options.on_text(prompt);
  for (int64_t i = 0; i < options.count && !options.stop(); ++i) {
    // A rank whose text is not wanted only takes part in the collectives: one token is enough.
    const auto most = options.keeps_text ? options.context : 1;
    const auto length = std::min(most, static_cast<int64_t>(tokens.size()));
    const auto last = torch::tensor(std::vector<int64_t>(tokens.end() - length, tokens.end()));
    const auto scores = scores_behind(model, last.to(options.device));
    const auto next = options.temperature < kGreedyBelow
                          ? scores.argmax()
                          : torch::multinomial(
                                torch::softmax(scores / options.temperature, -1), 1,
                                /*replacement=*/true, generator);
    tokens.push_back(next.item<int64_t>());
    options.on_text({static_cast<char>(tokens.back())});
  }
  return {tokens.begin() + (prompt.empty() ? 1 : 0), tokens.end()};
}

} // namespace fsdp::cli
