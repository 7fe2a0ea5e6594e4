#pragma once

#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include <cstdint>
#include <string>
#include <vector>

// The model of the benchmarks: like Llama, but without rotary embedding. transformer.py
// has the same model in Python, module by module and operator by operator: change both.

namespace bench {

struct TransformerOptions {
  int64_t dim = 64;
  int64_t layers = 16;
  int64_t heads = 4;
  int64_t vocabulary = 256;
  int64_t params_per_block = 9;
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

/// A transformer block with nine parameters. To measure what the number of parameters
/// costs, a block with more has norms behind it, and a block with fewer consists of that
/// many linear layers instead.
struct BlockImpl : torch::nn::Module {
  static constexpr int64_t kParams = 9;

  explicit BlockImpl(const TransformerOptions& options) : heads(options.heads) {
    const auto dim = options.dim;
    if (options.params_per_block < kParams) {
      for (int64_t i = 0; i < options.params_per_block; ++i) {
        linears.push_back(linear("linear" + std::to_string(i), dim, dim));
      }
      return;
    }
    norm1 = register_module("norm1", RmsNorm(dim));
    query = linear("query", dim, dim);
    key = linear("key", dim, dim);
    value = linear("value", dim, dim);
    output = linear("output", dim, dim);
    norm2 = register_module("norm2", RmsNorm(dim));
    gate = linear("gate", dim, 4 * dim);
    up = linear("up", dim, 4 * dim);
    down = linear("down", 4 * dim, dim);
    for (int64_t i = kParams; i < options.params_per_block; ++i) {
      norms.push_back(register_module("norm" + std::to_string(i), RmsNorm(dim)));
    }
  }

  torch::Tensor forward(torch::Tensor x) {
    for (auto& linear : linears) {
      x = x + torch::silu(linear(x));
    }
    if (linears.empty()) {
      x = x + attention(norm1(x));
      const auto h = norm2(x);
      x = x + down(torch::silu(gate(h)) * up(h));
    }
    for (auto& norm : norms) {
      x = norm(x);
    }
    return x;
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
  RmsNorm norm1{nullptr};
  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, output{nullptr};
  RmsNorm norm2{nullptr};
  torch::nn::Linear gate{nullptr}, up{nullptr}, down{nullptr};
  std::vector<RmsNorm> norms;
  std::vector<torch::nn::Linear> linears;
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

/// Gives the parameters the same values as transformer.py does.
inline void fill_parameters(torch::nn::Module& model) {
  torch::NoGradGuard no_grad;
  for (auto& parameter : model.parameters()) {
    parameter.copy_(
        torch::arange(parameter.numel(), torch::kFloat).cos().mul(0.1).view_as(parameter));
  }
}

/// Makes one group per block and one for the other parameters.
inline void shard(Transformer& net, const fsdp::FullyShardOptions& options) {
  for (auto& block : net->blocks) {
    fsdp::fully_shard(block, options);
  }
  fsdp::fully_shard(net, options);
}

/// A batch of tokens and the tokens to predict. transformer.py makes the same values.
/// Batches with different numbers have different values.
struct Batch {
  torch::Tensor tokens;  // of shape {size, sequence}
  torch::Tensor targets; // of shape {size * sequence}

  Batch(int64_t size, int64_t sequence, int64_t vocabulary, int64_t number = 0) {
    const auto position = torch::arange(size * sequence) + 5 * number;
    tokens = (position * 7).remainder(vocabulary).view({size, sequence});
    targets = (position * 11).remainder(vocabulary);
  }
};

inline torch::Tensor loss_of(Transformer& net, const Batch& batch) {
  const auto logits = net(batch.tokens);
  return torch::cross_entropy_loss(logits.view({-1, logits.size(-1)}), batch.targets);
}

} // namespace bench
