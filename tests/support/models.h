#pragma once

// The models of FSDP2's own tests. All of their modules are hooked. Children have the names and the
// order of Python's, so checkpoints and event logs can be compared.

#include <ATen/OpMathType.h>
#include <fsdp/activation_checkpointing.h>
#include <fsdp/hooked.h>
#include <fsdp/tie_weights.h>
#include <torch/torch.h>

#include <unordered_set>
#include <vector>

namespace fsdp::test {

/// Computes like Python's Linear. LibTorch's adds the bias in an operation of its own if the input
/// has more than two dims, so it rounds bf16 once more.
struct LinearImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
  torch::Tensor forward(const torch::Tensor& input) {
    return torch::linear(input, weight, bias);
  }
};
FSDP_MODULE(Linear);
FSDP_MODULE_IMPL(Embedding, torch::nn::EmbeddingImpl);
FSDP_MODULE_IMPL(LayerNorm, torch::nn::LayerNormImpl);
FSDP_MODULE_IMPL(Sequential, torch::nn::SequentialImpl);

inline Linear linear(int64_t in, int64_t out, bool bias = true) {
  return Linear(torch::nn::LinearOptions(in, out).bias(bias));
}
inline LayerNorm layer_norm(int64_t dim) {
  return LayerNorm(torch::nn::LayerNormOptions({dim}));
}

/// Python's model.parameters(): a shared parameter comes once.
inline std::vector<torch::Tensor> unique_parameters(const torch::nn::Module& module) {
  std::vector<torch::Tensor> unique;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& param : module.parameters()) {
    if (seen.insert(param.unsafeGetTensorImpl()).second) {
      unique.push_back(param);
    }
  }
  return unique;
}

// ------------------------------------------------------------ MLP, DoubleLinear

struct MLPImpl : torch::nn::Module {
  explicit MLPImpl(
      int64_t dim, bool bias = true, bool with_buffer = false, int64_t dim_multiplier = 4)
      : in_proj(register_module("in_proj", linear(dim, dim_multiplier * dim, bias))),
        out_proj(register_module("out_proj", linear(dim_multiplier * dim, dim, bias))) {
    if (with_buffer) {
      buffer = register_buffer("buffer", torch::randn({dim}));
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto z = torch::relu(out_proj(torch::relu(in_proj(x))));
    return buffer.defined() ? z + buffer : z;
  }
  /// Resets the buffer only, like Python's.
  void reset_parameters() {
    if (buffer.defined()) {
      torch::nn::init::normal_(buffer);
    }
  }
  Linear in_proj, out_proj;
  torch::Tensor buffer;
};
FSDP_MODULE(MLP);

struct DoubleLinearImpl : torch::nn::Module {
  explicit DoubleLinearImpl(int64_t dim, bool use_second_linear = true)
      : lin1(register_module("lin1", linear(dim, dim))),
        lin2(register_module("lin2", linear(dim, dim))),
        use_second_linear(use_second_linear) {}
  /// Returns one output per Linear. lin2 is unused without `use_second_linear`.
  std::vector<torch::Tensor> forward(const torch::Tensor& x) {
    std::vector<torch::Tensor> outputs{torch::relu(lin1(x))};
    if (use_second_linear) {
      outputs.push_back(torch::relu(lin2(x)));
    }
    return outputs;
  }
  Linear lin1, lin2;
  bool use_second_linear;
};
FSDP_MODULE(DoubleLinear);

// ------------------------------------------------------------ Transformer

struct ModelArgs {
  int64_t n_layers = 2;
  int64_t vocab_size = 8;
  int64_t max_seq_len = 16;
  int64_t dim = 16;
  int64_t n_heads = 4;
  double dropout_p = 0.1;
  bool use_attn_mask = true;
  bool weight_tying = true;
  bool checkpoint_activations = false; // of each block, at its call
};

struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const ModelArgs& args)
      : args(args),
        resid_dropout(register_module("resid_dropout", torch::nn::Dropout(args.dropout_p))),
        wq(register_module("wq", linear(args.dim, args.dim, false))),
        wk(register_module("wk", linear(args.dim, args.dim, false))),
        wv(register_module("wv", linear(args.dim, args.dim, false))),
        wo(register_module("wo", linear(args.dim, args.dim, false))) {
    TORCH_CHECK_VALUE(args.dim % args.n_heads == 0, "dim must be a multiple of n_heads");
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto heads = [&](const torch::Tensor& t) {
      return t.view({x.size(0), x.size(1), args.n_heads, -1}).transpose(1, 2);
    };
    const auto q = heads(wq(x)), k = heads(wk(x)), v = heads(wv(x));
    const auto output = torch::scaled_dot_product_attention(
        q, k, v, {}, is_training() ? args.dropout_p : 0.0, args.use_attn_mask);
    return resid_dropout(wo(output.transpose(1, 2).reshape({x.size(0), x.size(1), -1})));
  }
  ModelArgs args;
  torch::nn::Dropout resid_dropout;
  Linear wq, wk, wv, wo;
};
FSDP_MODULE(Attention);

struct FeedForwardImpl : torch::nn::Module {
  FeedForwardImpl(int64_t dim, int64_t hidden_dim, double dropout_p)
      : w1(register_module("w1", linear(dim, hidden_dim))),
        w2(register_module("w2", linear(hidden_dim, dim))),
        resid_dropout(register_module("resid_dropout", torch::nn::Dropout(dropout_p))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return resid_dropout(w2(torch::gelu(w1(x))));
  }
  Linear w1, w2;
  torch::nn::Dropout resid_dropout;
};
FSDP_MODULE(FeedForward);

struct TransformerBlockImpl : torch::nn::Module {
  explicit TransformerBlockImpl(const ModelArgs& args)
      : attention_norm(register_module("attention_norm", layer_norm(args.dim))),
        attention(register_module("attention", Attention(args))),
        ffn_norm(register_module("ffn_norm", layer_norm(args.dim))),
        feed_forward(
            register_module("feed_forward", FeedForward(args.dim, 4 * args.dim, args.dropout_p))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const auto h = x + attention(attention_norm(x));
    return h + feed_forward(ffn_norm(h));
  }
  LayerNorm attention_norm;
  Attention attention;
  LayerNorm ffn_norm;
  FeedForward feed_forward;
};
FSDP_MODULE(TransformerBlock);

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const ModelArgs& args = {})
      : args(args),
        tok_embeddings(register_module("tok_embeddings", Embedding(args.vocab_size, args.dim))),
        pos_embeddings(register_module("pos_embeddings", Embedding(args.max_seq_len, args.dim))),
        dropout(register_module("dropout", torch::nn::Dropout(args.dropout_p))),
        layers(register_module("layers", torch::nn::ModuleList())) {
    for (int64_t i = 0; i < args.n_layers; ++i) {
      blocks.emplace_back(args);
      layers->push_back(blocks.back());
    }
    norm = register_module("norm", layer_norm(args.dim));
    output = register_module("output", linear(args.dim, args.vocab_size, false));
    if (args.weight_tying) {
      tie_weights(output, tok_embeddings);
    }
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    TORCH_CHECK_VALUE(tokens.size(1) <= args.max_seq_len, "the sequence is too long");
    const auto positions = torch::arange(tokens.size(1), tokens.device());
    auto h = dropout(tok_embeddings(tokens) + pos_embeddings(positions));
    for (auto& block : blocks) {
      h = args.checkpoint_activations ? checkpoint(block, h) : block(h);
    }
    const auto logits = output(norm(h));
    return logits.to(at::toOpMathType(logits.scalar_type())); // at least fp32
  }
  ModelArgs args;
  Embedding tok_embeddings, pos_embeddings;
  torch::nn::Dropout dropout;
  torch::nn::ModuleList layers;
  std::vector<TransformerBlock> blocks; // the modules of `layers`
  LayerNorm norm{nullptr};
  Linear output{nullptr};
};
FSDP_MODULE(Transformer);

} // namespace fsdp::test
