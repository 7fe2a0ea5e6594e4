#include "cli/train/model.h"

#include <cmath>
#include <limits>
#include <string>

#include <fsdp/meta_init.h>
#include <fsdp/redistribute.h>
#include <fsdp/tensor_parallel.h>

#include "cli/train/lora.h"
#include "cli/train/rotary.h"

namespace fsdp::cli {

namespace {

nn::Linear linear(int64_t in, int64_t out) {
  return nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

constexpr auto kUnseen = -std::numeric_limits<double>::infinity(); // added to a score

/// Attention with capped scores. Torch has no single operator for it.
torch::Tensor capped_attention(
    const AttentionImpl::Heads& heads,
    const torch::Tensor& mask,
    bool causal,
    double scale,
    double cap) {
  const auto& [q, k, v] = heads;
  const auto shared = q.size(1) / k.size(1); // number of heads with the same keys
  const auto keys = k.repeat_interleave(shared, 1);
  const auto values = v.repeat_interleave(shared, 1);
  auto scores = (q.matmul(keys.transpose(2, 3)) * (scale / cap)).tanh() * cap;
  if (causal) {
    scores = scores + torch::full({q.size(2), k.size(2)}, kUnseen, q.options()).triu_(1);
  } else if (mask.defined()) {
    scores = scores + mask;
  }
  return torch::softmax(scores, -1, torch::kFloat).to(q.scalar_type()).matmul(values);
}

/// A tensor that is the same on all ranks, each of which computes a part of its gradient.
torch::Tensor with_partial_grad(
    const torch::Tensor& tensor, const std::optional<DeviceMesh>& parts) {
  return parts
             ? redistribute(tensor, *parts, Replicate{}, Replicate{}, {.grad_placement = Partial{}})
             : tensor;
}

} // namespace

int64_t default_hidden(int64_t dim) {
  return (8 * dim / 3 + 31) / 32 * 32;
}

int64_t default_kv_heads(int64_t heads) {
  return heads % 2 == 0 ? heads / 2 : heads;
}

int64_t aligned_mask_row(int64_t time) {
  return (time + 7) / 8 * 8;
}

bool is_into_residual(const std::string& name) {
  return name.find(".o_proj") != std::string::npos || name.find(".down_proj") != std::string::npos;
}

RMSNormImpl::RMSNormImpl(int64_t dim, double eps, bool from_one)
    : weight(register_parameter("weight", torch::ones({dim}))), eps(eps), from_one(from_one) {}

torch::Tensor RMSNormImpl::forward(const torch::Tensor& x) {
  const auto factor = with_partial_grad(weight, parts);
  if (from_one) { // in fp32: 1 + weight would lose most of a weight in bf16
    return torch::rms_norm(x.to(torch::kFloat), {x.size(-1)}, 1 + factor.to(torch::kFloat), eps)
        .to(x.scalar_type());
  }
  return torch::rms_norm(x, {x.size(-1)}, factor, eps);
}

ProjectionImpl::ProjectionImpl(
    const std::string& name, int64_t in, int64_t out, bool bias, const ModelDims& dims)
    : LinearImpl(torch::nn::LinearOptions(in, out).bias(bias)) {
  const auto lora = Lora::parse(dims.lora);
  if (lora && lora->trains(name)) {
    lora_A = register_module("lora_A", linear(in, lora->rank));
    lora_B = register_module("lora_B", linear(lora->rank, out));
    lora_scale = lora->scale();
  }
}

torch::Tensor ProjectionImpl::forward(const torch::Tensor& x) {
  const auto result = float8 ? float8_linear(x, weight, bias, *float8) : LinearImpl::forward(x);
  if (lora_A.is_empty()) {
    return result;
  }
  // Of A and B, one is divided as the layer is. Both products are linear, so terms of their results
  // are added up together with those of the layer.
  const auto a = divides_inputs ? lora_A->weight : with_partial_grad(lora_A->weight, parts);
  const auto b = divides_inputs ? with_partial_grad(lora_B->weight, parts) : lora_B->weight;
  return result + torch::linear(torch::linear(x, a), b) * lora_scale;
}

AttentionImpl::AttentionImpl(const ModelDims& dims)
    : head_dim(dims.head_dim()),
      scale(
          1 / std::sqrt(static_cast<double>(
                  dims.attention_size > 0 ? dims.attention_size : dims.head_dim()))),
      cap(dims.attention_cap) {
  const auto projection = [&](const char* name, int64_t in, int64_t out, bool bias) {
    return register_module(name, Projection(name, in, out, bias, dims));
  };
  q_proj = projection("q_proj", dims.dim, dims.heads * head_dim, dims.qkv_bias);
  k_proj = projection("k_proj", dims.dim, dims.kv_heads * head_dim, dims.qkv_bias);
  v_proj = projection("v_proj", dims.dim, dims.kv_heads * head_dim, dims.qkv_bias);
  o_proj = projection("o_proj", dims.heads * head_dim, dims.dim, dims.o_bias);
  if (dims.qk_norm) {
    q_norm = register_module("q_norm", RMSNorm(head_dim, dims.norm_eps, dims.gemma));
    k_norm = register_module("k_norm", RMSNorm(head_dim, dims.norm_eps, dims.gemma));
  }
}

AttentionImpl::Heads AttentionImpl::project(const torch::Tensor& x, const torch::Tensor& rotary) {
  // -1: under tensor parallelism a rank has only a part of the heads.
  const auto heads_of = [&](Projection& projection) {
    return projection(x).view({x.size(0), x.size(1), -1, head_dim}).transpose(1, 2);
  };
  const auto rotated = [&](Projection& projection, RMSNorm& norm) {
    const auto heads = heads_of(projection);
    return rotate(norm.is_empty() ? heads : norm(heads), rotary);
  };
  // Braces: the modules run in this order, on all ranks alike.
  return {rotated(q_proj, q_norm), rotated(k_proj, k_norm), heads_of(v_proj)};
}

torch::Tensor AttentionImpl::mix(const Heads& heads, const torch::Tensor& mask, bool causal) {
  const auto& [q, k, v] = heads;
  const auto mixed =
      cap > 0 ? capped_attention(heads, mask, causal, scale, cap)
              : at::scaled_dot_product_attention(
                    q, k, v, mask.defined() ? std::optional(mask) : std::nullopt, /*dropout_p=*/0,
                    causal, scale, /*enable_gqa=*/q.size(1) != k.size(1));
  return o_proj(mixed.transpose(1, 2).reshape({q.size(0), q.size(2), -1}));
}

torch::Tensor AttentionImpl::forward(
    const torch::Tensor& x, const torch::Tensor& rotary, const torch::Tensor& mask) {
  return mix(project(x, rotary), mask, /*causal=*/!mask.defined());
}

FeedForwardImpl::FeedForwardImpl(const ModelDims& dims) : gemma(dims.gemma) {
  const auto projection = [&](const char* name, int64_t in, int64_t out) {
    return register_module(name, Projection(name, in, out, dims.mlp_bias, dims));
  };
  gate_proj = projection("gate_proj", dims.dim, dims.hidden);
  up_proj = projection("up_proj", dims.dim, dims.hidden);
  down_proj = projection("down_proj", dims.hidden, dims.dim);
}

torch::Tensor FeedForwardImpl::forward(const torch::Tensor& x) {
  const auto gate = gate_proj(x);
  return down_proj((gemma ? torch::gelu(gate, "tanh") : torch::silu(gate)) * up_proj(x));
}

BlockImpl::BlockImpl(const ModelDims& dims) {
  const auto norm = [&](const char* name) {
    return register_module(name, RMSNorm(dims.dim, dims.norm_eps, dims.gemma));
  };
  input_layernorm = norm("input_layernorm");
  post_attention_layernorm = norm("post_attention_layernorm");
  self_attn = register_module("self_attn", Attention(dims));
  mlp = register_module("mlp", FeedForward(dims));
  if (dims.sandwich_norms) {
    pre_feedforward_layernorm = norm("pre_feedforward_layernorm");
    post_feedforward_layernorm = norm("post_feedforward_layernorm");
  }
}

torch::Tensor BlockImpl::forward(
    const torch::Tensor& x, const torch::Tensor& rotary, const torch::Tensor& mask) {
  return with_attention(
      x, [&](const torch::Tensor& normalized) { return self_attn(normalized, rotary, mask); });
}

TransformerImpl::TransformerImpl(const ModelDims& dims)
    : dims(dims),
      embed_tokens(register_module("embed_tokens", nn::Embedding(dims.vocab, dims.dim))) {
  auto list = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < dims.layers; ++i) {
    layers.emplace_back(dims);
    list->push_back(layers.back().ptr());
  }
  norm = register_module("norm", RMSNorm(dims.dim, dims.norm_eps, dims.gemma));
  if (!dims.tied) {
    lm_head = register_module("lm_head", linear(dims.dim, dims.vocab));
  }
  if (dims.lora != "none") {
    for (auto& item : named_parameters()) {
      item.value().set_requires_grad(is_adapter(item.key()));
    }
  }
}

torch::Tensor TransformerImpl::embed(const torch::Tensor& tokens) {
  const auto x = embed_tokens(tokens);
  return dims.gemma
             ? x * torch::scalar_tensor(std::sqrt(static_cast<double>(dims.dim)), x.options())
             : x;
}

torch::Tensor TransformerImpl::mask(
    const torch::Tensor& x, int64_t window, const torch::Tensor& documents) {
  const auto time = x.size(1);
  const bool slides = window > 0 && window < time;
  if (!slides && !documents.defined()) {
    return {};
  }
  auto seen = torch::ones({time, time}, x.options().dtype(torch::kBool)).tril_();
  if (slides) {
    seen.triu_(1 - window);
  }
  if (documents.defined()) {
    seen = documents.unsqueeze(2).eq(documents.unsqueeze(1)).logical_and_(seen).unsqueeze(1);
  }
  auto shape = seen.sizes().vec();
  shape.back() = aligned_mask_row(time);
  // A token always sees itself, so softmax never has a row without any score.
  return torch::zeros(shape, x.options())
      .narrow(-1, 0, time)
      .masked_fill_(seen.logical_not_(), kUnseen);
}

torch::Tensor TransformerImpl::forward(
    const torch::Tensor& tokens, const torch::Tensor& documents) {
  auto x = embed(tokens);
  const auto time = tokens.size(1);
  const auto turns = rotary(time, x);
  torch::Tensor whole;
  torch::Tensor sliding;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto window = window_of(i);
    auto& shared = window > 0 && window < time ? sliding : whole;
    if (!shared.defined()) {
      shared = mask(x, window, documents);
    }
    x = layers[i](x, window > 0 ? turns.sliding : turns.whole, shared);
  }
  return scores_of(x);
}

TransformerImpl::Rotary TransformerImpl::rotary(int64_t time, const torch::Tensor& like) const {
  Rotary result;
  result.whole = rotary_table(time, dims.head_dim(), dims.rotary_base, dims.rotary_scaling, like);
  result.sliding = dims.window_rotary_base > 0
                       ? rotary_table(time, dims.head_dim(), dims.window_rotary_base, "none", like)
                       : result.whole;
  return result;
}

torch::Tensor TransformerImpl::scores_of(const torch::Tensor& x) {
  const auto scores = uncapped_scores_of(norm(x));
  return dims.score_cap > 0 ? (scores / dims.score_cap).tanh() * dims.score_cap : scores;
}

torch::Tensor TransformerImpl::uncapped_scores_of(const torch::Tensor& x) {
  if (!dims.tied) {
    return lm_head(x);
  }
  // This is a plain operator, not a module that `parallelize` divides. Each rank has some rows of
  // the weight and computes one term of x's gradient. `redistribute` sums the terms in backward.
  return torch::linear(with_partial_grad(x, tensor_mesh), embed_tokens->weight);
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
  if (model->dims.qk_norm) { // each rank has a part of the heads, and so of the gradient
    for (auto& layer : model->layers) {
      layer->self_attn->q_norm->parts = mesh;
      layer->self_attn->k_norm->parts = mesh;
    }
  }
  for (const auto& item : model->named_modules()) {
    auto* projection = item.value()->as<ProjectionImpl>();
    if (projection && !projection->lora_A.is_empty()) {
      const bool into_residual = is_into_residual(item.key());
      projection->parts = mesh;
      projection->divides_inputs = into_residual;
      distribute_parameter(
          into_residual ? projection->lora_A : projection->lora_B, "weight", mesh,
          {Shard{into_residual ? 1 : 0}});
    }
  }
}

void init_adapters(Transformer& model, uint64_t seed) {
  init_parameters(
      model,
      [&](const std::string& name, torch::Tensor& param) {
        if (name.ends_with("lora_A.weight")) { // as PEFT does it
          const auto bound = 1 / std::sqrt(static_cast<double>(param.size(1)));
          param.copy_(param.to(torch::kFloat).uniform_(-bound, bound));
        } else if (name.ends_with("lora_B.weight")) {
          param.zero_();
        }
      },
      seed);
}

void init_weights(Transformer& model, uint64_t seed) {
  const auto residual_scale = 1 / std::sqrt(2.0 * static_cast<double>(model->dims.layers));
  init_parameters(
      model,
      [&](const std::string& name, torch::Tensor& param) {
        if (param.dim() == 1) {
          param.fill_(name.ends_with(".bias") || model->dims.gemma ? 0 : 1);
          return;
        }
        auto values = param.to(torch::kFloat); // the same ones in any dtype, but for rounding
        values.normal_(0, is_into_residual(name) ? 0.02 * residual_scale : 0.02);
        param.copy_(values);
      },
      seed);
  init_adapters(model, seed);
}

} // namespace fsdp::cli
