#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/hooked.h>
#include <fsdp/nn.h>

namespace fsdp::cli {

/// Sizes of a Llama-style decoder.
struct ModelDims {
  int64_t vocab = 256; // bytes
  int64_t dim = 128;
  int64_t layers = 4;
  int64_t heads = 4;    // divides dim, an even number of times
  int64_t kv_heads = 2; // divides heads
  int64_t hidden = 352; // inside the feed-forward part
  bool tied = false;    // the output is the embedding's weight again
  double rotary_base = 10000;
  double norm_eps = 1e-5;

  int64_t head_dim() const {
    return dim / heads;
  }
};

/// The usual size of `hidden`: two thirds of 4 * dim, rounded up to 32.
int64_t default_hidden(int64_t dim);
/// Half as many as heads, or as many where that does not go.
int64_t default_kv_heads(int64_t heads);

// Modules and parameters carry the names that Hugging Face gives them. None of
// the weights means anything before `init_weights`.

struct RMSNormImpl : torch::nn::Module {
  RMSNormImpl(int64_t dim, double eps);
  torch::Tensor forward(const torch::Tensor& x);

  torch::Tensor weight;
  double eps;
};
FSDP_MODULE(RMSNorm);

/// Causal, with rotary positions; `kv_heads` heads of keys and values serve all.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const ModelDims& dims);
  /// x: (batch, time, dim); rotary: (2, time, head_dim / 2), cosines and sines.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& rotary);

  int64_t head_dim;
  nn::Linear q_proj, k_proj, v_proj, o_proj;
};
FSDP_MODULE(Attention);

/// SwiGLU.
struct FeedForwardImpl : torch::nn::Module {
  explicit FeedForwardImpl(const ModelDims& dims);
  torch::Tensor forward(const torch::Tensor& x);

  nn::Linear gate_proj, up_proj, down_proj;
};
FSDP_MODULE(FeedForward);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const ModelDims& dims);
  torch::Tensor forward(torch::Tensor x, const torch::Tensor& rotary);

  RMSNorm input_layernorm, post_attention_layernorm;
  Attention self_attn;
  FeedForward mlp;
};
FSDP_MODULE(Block);

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const ModelDims& dims);
  /// (batch, time) int64 -> (batch, time, vocab): scores of the next token; under
  /// tensor parallelism this rank's part of them.
  torch::Tensor forward(const torch::Tensor& tokens);

  ModelDims dims;
  std::optional<DeviceMesh> tensor_mesh; // of one axis, under tensor parallelism
  nn::Embedding embed_tokens;
  std::vector<Block> layers;
  RMSNorm norm;
  nn::Linear lm_head{nullptr}; // none when tied
};
FSDP_MODULE(Transformer);

/// Divides the model over a mesh of one axis, as Megatron does: heads, hidden
/// features and vocabulary. The axis must divide them. Before fully_shard.
/// Collective.
void parallelize(Transformer& model, const DeviceMesh& mesh);

/// Fills the model, sharded or not, as small GPTs are: normal with 0.02, less for
/// the projections back into the residual stream, norms one. `seed` alone decides,
/// whatever the mesh. Of what is sharded one parameter at a time is whole.
void init_weights(Transformer& model, uint64_t seed);

} // namespace fsdp::cli
