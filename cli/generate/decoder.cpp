#include "cli/generate/decoder.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

namespace fsdp::cli {

Decoder::Decoder(Transformer model, int64_t most) : model_(std::move(model)), most_(most) {
  const auto& dims = model_->dims;
  const auto& weight = model_->embed_tokens->weight;
  rotary_ = model_->rotary(most, weight);
  for (int64_t i = 0; i < dims.layers; ++i) {
    for (auto* kept : {&keys_, &values_}) {
      kept->push_back(torch::empty({1, dims.kv_heads, most, dims.head_dim()}, weight.options()));
    }
  }
}

torch::Tensor Decoder::scores_behind(const std::vector<int64_t>& tokens) {
  const torch::NoGradGuard no_grad;
  const auto time = std::ssize(tokens);
  TORCH_CHECK(time == 1 || length_ == 0, "several tokens must be the first ones");
  TORCH_CHECK(length_ + time <= most_, "there is room for ", most_, " tokens only");
  const auto& weight = model_->embed_tokens->weight;
  auto x = model_->embed(torch::tensor(tokens).to(weight.device()).unsqueeze(0));
  torch::Tensor mask; // of the blocks with a window, all of which have the same
  for (size_t i = 0; i < model_->layers.size(); ++i) {
    if (length_ == 0 && !mask.defined()) {
      mask = TransformerImpl::mask(x, model_->window_of(i), /*documents=*/{});
    }
    x = model_->layers[i]->with_attention(
        x, [&](const torch::Tensor& normalized) { return attend(i, normalized, mask); });
  }
  length_ += time;
  return model_->scores_of(x.narrow(1, time - 1, 1)).flatten().to(torch::kCPU, torch::kFloat);
}

torch::Tensor Decoder::attend(
    size_t block, const torch::Tensor& x, const torch::Tensor& window_mask) {
  auto& attention = model_->layers[block]->self_attn;
  const auto time = x.size(1);
  const auto window = model_->window_of(block);
  const auto& rotary = window > 0 ? rotary_.sliding : rotary_.whole;
  const auto heads = attention->project(x, rotary.narrow(1, length_, time));
  keys_[block].narrow(2, length_, time).copy_(heads.keys);
  values_[block].narrow(2, length_, time).copy_(heads.values);
  if (length_ == 0) { // sees only what is new
    const auto mask = window > 0 ? window_mask : torch::Tensor();
    return attention->mix(heads, mask, /*causal=*/!mask.defined());
  }
  const auto all = length_ + 1;
  const auto seen = window > 0 ? std::min(all, window) : all;
  const auto last = [&](const torch::Tensor& kept) { return kept.narrow(2, all - seen, seen); };
  return attention->mix(
      {heads.queries, last(keys_[block]), last(values_[block])}, /*mask=*/{}, /*causal=*/false);
}

} // namespace fsdp::cli
