#pragma once

#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include <cstdint>
#include <string>
#include <vector>

// The model of the benchmarks: as Llama, without rotary embedding. overhead.py has
// the same one in Python, module by module and operator by operator: change both.

namespace bench {

struct TransformerOptions {
  int64_t dim = 64;
  int64_t layers = 16;
  int64_t heads = 4;
  int64_t vocabulary = 256;
};

struct RmsNormImpl : torch::nn::Module {
  explicit RmsNormImpl(int64_t dim)
      : sizes{dim}, weight(register_parameter("weight", torch::ones({dim}))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    return torch::rms_norm(x, sizes, weight, /*eps=*/1e-5);
  }

  const std::vector<int64_t> sizes;
  torch::Tensor weight;
};
TORCH_MODULE(RmsNorm);

/// Nine parameters.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const TransformerOptions& options)
      : heads(options.heads),
        norm1(register_module("norm1", RmsNorm(options.dim))),
        query(linear("query", options.dim, options.dim)),
        key(linear("key", options.dim, options.dim)),
        value(linear("value", options.dim, options.dim)),
        output(linear("output", options.dim, options.dim)),
        norm2(register_module("norm2", RmsNorm(options.dim))),
        gate(linear("gate", options.dim, 4 * options.dim)),
        up(linear("up", options.dim, 4 * options.dim)),
        down(linear("down", 4 * options.dim, options.dim)) {}

  torch::Tensor forward(torch::Tensor x) {
    x = x + attention(norm1(x));
    const auto h = norm2(x);
    return x + down(torch::silu(gate(h)) * up(h));
  }

 private:
  torch::nn::Linear linear(const std::string& name, int64_t in, int64_t out) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
  }

  torch::Tensor attention(const torch::Tensor& x) {
    const auto split = [&](const torch::Tensor& t) {
      return t.view({t.size(0), t.size(1), heads, -1}).transpose(1, 2);
    };
    const auto mixed = torch::scaled_dot_product_attention(
        split(query(x)), split(key(x)), split(value(x)), /*attn_mask=*/{}, /*dropout_p=*/0.0,
        /*is_causal=*/true);
    return output(mixed.transpose(1, 2).reshape(x.sizes()));
  }

  const int64_t heads;
  RmsNorm norm1;
  torch::nn::Linear query, key, value, output;
  RmsNorm norm2;
  torch::nn::Linear gate, up, down;
};
FSDP_MODULE(Block);

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const TransformerOptions& options)
      : embedding(
            register_module("embedding", torch::nn::Embedding(options.vocabulary, options.dim))) {
    for (int64_t i = 0; i < options.layers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block(options)));
    }
    norm = register_module("norm", RmsNorm(options.dim));
    head = register_module(
        "head",
        torch::nn::Linear(torch::nn::LinearOptions(options.dim, options.vocabulary).bias(false)));
  }

  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embedding(tokens);
    for (auto& block : blocks) {
      x = block(x);
    }
    return head(norm(x));
  }

  torch::nn::Embedding embedding;
  std::vector<Block> blocks;
  RmsNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
FSDP_MODULE(Transformer);

/// The same values in every language.
inline void fill_parameters(torch::nn::Module& model) {
  torch::NoGradGuard no_grad;
  for (auto& parameter : model.parameters()) {
    parameter.copy_(
        torch::arange(parameter.numel(), torch::kFloat).cos().mul(0.1).view_as(parameter));
  }
}

} // namespace bench
