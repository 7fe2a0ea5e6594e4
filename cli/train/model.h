#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/float8.h>
#include <fsdp/hooked.h>
#include <fsdp/nn.h>

namespace fsdp::cli {

/// Sizes of a Llama-style decoder, and in what it differs from Llama.
struct ModelDims {
  int64_t vocab = 256; // bytes
  int64_t dim = 128;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 2; // divides heads
  int64_t hidden = 352; // width inside the feed-forward part
  bool tied = false;    // the output layer uses the embedding's weight
  double rotary_base = 10000;
  double norm_eps = 1e-5;

  int64_t head_size = 0;         // of each head, even; 0: dim / heads
  bool qkv_bias = false;         // of the projections to queries, keys and values
  bool o_bias = false;           // of the projection back
  bool mlp_bias = false;         // of the feed-forward part
  bool qk_norm = false;          // norms of each query and key
  int64_t window = 0;            // attention reaches this many tokens back, itself included; 0: all
  int64_t window_from = 0;       // only in blocks from this one on
  int64_t full_every = 0;        // every such block, counted from 1, has no window; 0: none
  double window_rotary_base = 0; // of blocks with a window, which are not scaled then; 0: as others
  std::string rotary_scaling = "none"; // see RotaryScaling
  bool gemma = false;          // GELU, norms that multiply by 1 + weight, and a scaled embedding
  bool sandwich_norms = false; // norms behind attention and feed-forward part, too
  int64_t attention_size = 0;  // scores are divided by its square root; 0: the size of a head
  double attention_cap = 0;    // scores s of attention become cap * tanh(s / cap); 0: no cap
  double score_cap = 0;        // the same for the scores of the next token
  std::string lora = "none";   // see Lora; it trains nothing else then

  int64_t head_dim() const {
    return head_size > 0 ? head_size : dim / heads;
  }
  /// How far back the attention of a block reaches; 0: to the beginning.
  int64_t window_of(int64_t block) const {
    const bool is_full = block < window_from || (full_every > 0 && (block + 1) % full_every == 0);
    return is_full ? 0 : window;
  }
};

/// The usual size of `hidden`: two thirds of 4 * dim, rounded up to a multiple of 32.
int64_t default_hidden(int64_t dim);
/// `heads` / 2 if `heads` is even, else `heads`.
int64_t default_kv_heads(int64_t heads);

// Modules and parameters have the names that Hugging Face gives them. The constructors do not
// initialize the weights: call `init_weights` or load a checkpoint.

/// Elements of a row of the mask in memory. CUDA's kernels copy a mask whose rows are not aligned.
int64_t aligned_mask_row(int64_t time);

/// Whether the name is of a projection back into the residual stream, or of a parameter of one.
bool is_into_residual(const std::string& name);

struct RMSNormImpl : torch::nn::Module {
  /// `from_one`: multiplies by 1 + weight.
  RMSNormImpl(int64_t dim, double eps, bool from_one = false);
  torch::Tensor forward(const torch::Tensor& x);

  torch::Tensor weight;
  double eps;
  bool from_one;
  /// Set if each rank of this mesh normalizes another part of the heads with the same weight.
  std::optional<DeviceMesh> parts;
};
FSDP_MODULE(RMSNorm);

/// A linear layer of a block. If LoRA trains it, it has two more matrices.
struct ProjectionImpl : torch::nn::LinearImpl {
  /// `name`: by which --lora knows it.
  ProjectionImpl(
      const std::string& name, int64_t in, int64_t out, bool bias, const ModelDims& dims);
  torch::Tensor forward(const torch::Tensor& x);

  nn::Linear lora_A{nullptr}, lora_B{nullptr}; // null without LoRA
  double lora_scale = 0;
  std::optional<Float8Scaling> float8; // how it multiplies in float8, if it does
  /// Set if each rank of this mesh has a part of the layer: of its inputs, or of its outputs.
  std::optional<DeviceMesh> parts;
  bool divides_inputs = false;
};
FSDP_MODULE(Projection);

/// Causal attention with rotary positions. All heads share `kv_heads` heads of keys and values.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const ModelDims& dims);
  /// x: (batch, time, dim); rotary: (2, time, head_dim / 2), cosines and sines. `mask` is added to
  /// the scores; see TransformerImpl::mask.
  torch::Tensor forward(
      const torch::Tensor& x, const torch::Tensor& rotary, const torch::Tensor& mask);

  // The two parts of forward, for callers that keep keys and values of earlier tokens.

  /// Of each head and token: (batch, heads, time, head_dim).
  struct Heads {
    torch::Tensor queries, keys, values;
  };
  Heads project(const torch::Tensor& x, const torch::Tensor& rotary);
  /// `causal`: a token sees only those before it, and `mask` must be undefined. Otherwise it sees
  /// all, or what `mask` says.
  torch::Tensor mix(const Heads& heads, const torch::Tensor& mask, bool causal);

  int64_t head_dim;
  double scale; // of the scores
  double cap;   // see ModelDims::attention_cap
  Projection q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
  RMSNorm q_norm{nullptr}, k_norm{nullptr}; // null without qk_norm
};
FSDP_MODULE(Attention);

/// SwiGLU, or GeGLU for Gemma.
struct FeedForwardImpl : torch::nn::Module {
  explicit FeedForwardImpl(const ModelDims& dims);
  torch::Tensor forward(const torch::Tensor& x);

  bool gemma;
  Projection gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
FSDP_MODULE(FeedForward);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const ModelDims& dims);
  torch::Tensor forward(
      const torch::Tensor& x, const torch::Tensor& rotary, const torch::Tensor& mask);
  /// The same, with `attend(normalized)` instead of attention.
  template <class Attend>
  torch::Tensor with_attention(const torch::Tensor& x, const Attend& attend) {
    if (pre_feedforward_layernorm.is_empty()) {
      const auto attended = x + attend(input_layernorm(x));
      return attended + mlp(post_attention_layernorm(attended));
    }
    const auto attended = x + post_attention_layernorm(attend(input_layernorm(x)));
    return attended + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(attended)));
  }

  RMSNorm input_layernorm{nullptr}, post_attention_layernorm{nullptr};
  /// Null without sandwich_norms.
  RMSNorm pre_feedforward_layernorm{nullptr}, post_feedforward_layernorm{nullptr};
  Attention self_attn{nullptr};
  FeedForward mlp{nullptr};
};
FSDP_MODULE(Block);

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const ModelDims& dims);
  /// Takes int64 tokens (batch, time) and returns scores of the next token (batch, time, vocab).
  /// Under tensor parallelism a rank returns its part of the vocabulary. A token sees only tokens
  /// with the same number in `documents` (batch, time), if it is defined. (Positions are relative,
  /// so they need not begin again.)
  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& documents = {});

  // The parts of forward besides the blocks.

  /// (batch, time, dim)
  torch::Tensor embed(const torch::Tensor& tokens);
  /// The mask of blocks whose attention reaches `window` tokens back; 0: all. It is 0 where a token
  /// sees another one, else minus infinity: (time, time), or (batch, 1, time, time) with documents.
  /// Undefined if each token sees all before it. All blocks of a kind share one: torch would make
  /// and keep a copy of a boolean mask for each.
  static torch::Tensor mask(const torch::Tensor& x, int64_t window, const torch::Tensor& documents);
  int64_t window_of(size_t block) const {
    return dims.window_of(static_cast<int64_t>(block));
  }
  /// The rotary positions of blocks without a window, and of those with one; see rotary_table.
  struct Rotary {
    torch::Tensor whole, sliding;
  };
  Rotary rotary(int64_t time, const torch::Tensor& like) const;
  /// The scores of the next token, from the result of the last block.
  torch::Tensor scores_of(const torch::Tensor& x);

  torch::Tensor uncapped_scores_of(const torch::Tensor& x);

  ModelDims dims;
  std::optional<DeviceMesh> tensor_mesh; // a mesh of one axis, if tensor parallel
  nn::Embedding embed_tokens;
  std::vector<Block> layers;
  RMSNorm norm{nullptr};
  nn::Linear lm_head{nullptr}; // null if tied
};
FSDP_MODULE(Transformer);

/// Makes the model tensor parallel, as Megatron does: divides heads, hidden features and vocabulary
/// over a mesh of one axis, whose size must divide them. Call it before fully_shard. Collective.
void parallelize(Transformer& model, const DeviceMesh& mesh);

/// Initializes a model, sharded or not, in the way of small GPTs: normal with deviation 0.02, less
/// for the projections back into the residual stream, and ones for the norms. LoRA's matrices get
/// values with which the model computes what it did without them. The weights depend only on
/// `seed`, not on the mesh. A sharded model holds one unsharded parameter at a time.
void init_weights(Transformer& model, uint64_t seed);
/// The same for LoRA's matrices alone.
void init_adapters(Transformer& model, uint64_t seed);

} // namespace fsdp::cli
