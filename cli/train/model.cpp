#include "cli/train/model.h"

#include <cmath>
#include <string>

#include <fsdp/meta_init.h>
#include <fsdp/redistribute.h>
#include <fsdp/tensor_parallel.h>

namespace fsdp::cli {

namespace {

nn::Linear linear(int64_t in, int64_t out) {
  return nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

/// Cosines and sines of the angles of every position: (2, time, head_dim / 2).
torch::Tensor rotary_table(int64_t time, const ModelDims& dims, const torch::Tensor& like) {
  const auto options = like.options().dtype(torch::kFloat);
  const auto exponents = torch::arange(0, dims.head_dim(), 2, options) / dims.head_dim();
  const auto angles =
      torch::outer(torch::arange(time, options), torch::pow(dims.rotary_base, -exponents));
  return torch::stack({angles.cos(), angles.sin()}).to(like.scalar_type());
}

/// Rotates the pairs (i, i + head_dim / 2) of `x`, which is (batch, heads, time, head_dim).
torch::Tensor rotate(const torch::Tensor& x, const torch::Tensor& rotary) {
  const auto halves = x.chunk(2, -1);
  const auto cos = rotary[0];
  const auto sin = rotary[1];
  return torch::cat(
      {halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, /*dim=*/-1);
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

} // namespace

int64_t default_hidden(int64_t dim) {
  return (8 * dim / 3 + 31) / 32 * 32;
}

int64_t default_kv_heads(int64_t heads) {
  return heads % 2 == 0 ? heads / 2 : heads;
}

RMSNormImpl::RMSNormImpl(int64_t dim, double eps)
    : weight(register_parameter("weight", torch::ones({dim}))), eps(eps) {}

torch::Tensor RMSNormImpl::forward(const torch::Tensor& x) {
  return torch::rms_norm(x, {x.size(-1)}, weight, eps);
}

AttentionImpl::AttentionImpl(const ModelDims& dims)
    : head_dim(dims.head_dim()),
      q_proj(register_module("q_proj", linear(dims.dim, dims.heads * head_dim))),
      k_proj(register_module("k_proj", linear(dims.dim, dims.kv_heads * head_dim))),
      v_proj(register_module("v_proj", linear(dims.dim, dims.kv_heads * head_dim))),
      o_proj(register_module("o_proj", linear(dims.heads * head_dim, dims.dim))) {}

torch::Tensor AttentionImpl::forward(const torch::Tensor& x, const torch::Tensor& rotary) {
  const auto batch = x.size(0);
  const auto time = x.size(1);
  // -1: under tensor parallelism a rank has only a part of the heads.
  const auto heads_of = [&](nn::Linear& projection) {
    return projection(x).view({batch, time, -1, head_dim}).transpose(1, 2);
  };
  const auto q = rotate(heads_of(q_proj), rotary);
  const auto k = rotate(heads_of(k_proj), rotary);
  const auto mixed = at::scaled_dot_product_attention(
      q, k, heads_of(v_proj), /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/true,
      /*scale=*/{}, /*enable_gqa=*/q.size(1) != k.size(1));
  return o_proj(mixed.transpose(1, 2).reshape({batch, time, -1}));
}

FeedForwardImpl::FeedForwardImpl(const ModelDims& dims)
    : gate_proj(register_module("gate_proj", linear(dims.dim, dims.hidden))),
      up_proj(register_module("up_proj", linear(dims.dim, dims.hidden))),
      down_proj(register_module("down_proj", linear(dims.hidden, dims.dim))) {}

torch::Tensor FeedForwardImpl::forward(const torch::Tensor& x) {
  return down_proj(torch::silu(gate_proj(x)) * up_proj(x));
}

BlockImpl::BlockImpl(const ModelDims& dims)
    : input_layernorm(register_module("input_layernorm", RMSNorm(dims.dim, dims.norm_eps))),
      post_attention_layernorm(
          register_module("post_attention_layernorm", RMSNorm(dims.dim, dims.norm_eps))),
      self_attn(register_module("self_attn", Attention(dims))),
      mlp(register_module("mlp", FeedForward(dims))) {}

torch::Tensor BlockImpl::forward(torch::Tensor x, const torch::Tensor& rotary) {
  x = x + self_attn(input_layernorm(x), rotary);
  return x + mlp(post_attention_layernorm(x));
}

TransformerImpl::TransformerImpl(const ModelDims& dims)
    : dims(dims),
      embed_tokens(register_module("embed_tokens", nn::Embedding(dims.vocab, dims.dim))),
      norm(nullptr) {
  auto list = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < dims.layers; ++i) {
    layers.emplace_back(dims);
    list->push_back(layers.back().ptr());
  }
  norm = register_module("norm", RMSNorm(dims.dim, dims.norm_eps));
  if (!dims.tied) {
    lm_head = register_module("lm_head", linear(dims.dim, dims.vocab));
  }
}

torch::Tensor TransformerImpl::forward(const torch::Tensor& tokens) {
  auto x = embed_tokens(tokens);
  const auto rotary = rotary_table(tokens.size(1), dims, x);
  for (auto& layer : layers) {
    x = layer(x, rotary);
  }
  x = norm(x);
  if (!dims.tied) {
    return lm_head(x);
  }
  // This is a plain operator, not a module that `parallelize` divides. Each rank has some rows of
  // the weight and computes one term of x's gradient. `redistribute` sums the terms in backward.
  return torch::linear(
      tensor_mesh
          ? redistribute(x, *tensor_mesh, Replicate{}, Replicate{}, {.grad_placement = Partial{}})
          : x,
      embed_tokens->weight);
}

void parallelize(Transformer& model, const DeviceMesh& mesh) {
  std::vector<ParallelPlan::Entry> plan{
      {"embed_tokens", RowwiseParallel{.input_layouts = Replicate{}}},
      {"layers.*.self_attn.[qkv]_proj", ColwiseParallel{}},
      {"layers.*.self_attn.o_proj", RowwiseParallel{}},
      {"layers.*.mlp.gate_proj", ColwiseParallel{}},
      {"layers.*.mlp.up_proj", ColwiseParallel{}},
      {"layers.*.mlp.down_proj", RowwiseParallel{}}};
  if (!model->dims.tied) {
    plan.emplace_back("lm_head", ColwiseParallel{});
  }
  parallelize_module(model, mesh, plan);
  model->tensor_mesh = mesh;
}

void init_weights(Transformer& model, uint64_t seed) {
  const auto residual_scale = 1 / std::sqrt(2.0 * static_cast<double>(model->dims.layers));
  init_parameters(
      model,
      [&](const std::string& name, torch::Tensor& param) {
        if (param.dim() == 1) {
          param.fill_(1);
          return;
        }
        const bool into_residual =
            ends_with(name, "o_proj.weight") || ends_with(name, "down_proj.weight");
        auto values = param.to(torch::kFloat); // the same ones in any dtype, but for rounding
        values.normal_(0, into_residual ? 0.02 * residual_scale : 0.02);
        param.copy_(values);
      },
      seed);
}

} // namespace fsdp::cli
