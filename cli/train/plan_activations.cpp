#include "cli/train/plan_activations.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <utility>

#include "cli/train/lora.h"

namespace fsdp::cli {

namespace {

/// Bytes of vectors that one token has on a rank.
struct TokenBytes {
  TokenBytes(const TrainConfig& config, const MeshShape& mesh)
      : element(element_bytes(config.param_dtype)),
        wide(element * config.model.dim),
        heads(element * config.model.heads * config.model.head_dim() / mesh.tensor),
        kv_heads(element * config.model.kv_heads * config.model.head_dim() / mesh.tensor),
        hidden(element * config.model.hidden / mesh.tensor),
        softmax_sums(4 * config.model.heads / mesh.tensor),
        swiglu(4 * hidden),
        num_scores(
            config.model.attention_cap == 0 ? 0
                                            : config.model.heads / mesh.tensor * config.context) {}

  int64_t element;
  int64_t wide; // one vector of the residual stream
  int64_t heads;
  int64_t kv_heads;
  int64_t hidden;
  int64_t softmax_sums;
  int64_t swiglu;     // gate, its silu, up, and their product
  int64_t num_scores; // elements; only capped attention keeps them
};

/// A norm keeps its input, its output, and the factor of each token. On the CPU it is made of
/// several operators, so it also keeps the output without the weight, if that is trained, and the
/// input in fp32.
int64_t norm_bytes(const TrainConfig& config, const TokenBytes& token) {
  const bool on_cpu = config.device == "cpu";
  return 2 * token.wide + 4 + (on_cpu && !config.has_lora() ? token.wide : 0) +
         (on_cpu && config.param_dtype != "fp32" ? 4 * config.model.dim : 0);
}

/// Norms of queries and keys keep their input and the factor of each head. On the CPU they are made
/// of several operators, too.
int64_t qk_norm_bytes(const TrainConfig& config, const TokenBytes& token) {
  if (!config.model.qk_norm) {
    return 0;
  }
  const auto input = token.heads + token.kv_heads;
  const auto numel = input / token.element;
  const auto on_cpu = input + (config.param_dtype == "fp32" ? 0 : 4 * numel);
  return input + numel / config.model.head_dim() * 4 + (config.device == "cpu" ? on_cpu : 0);
}

/// Attention keeps rotated queries and keys, values, its output, and the sum of each softmax. On
/// the CPU the output is copied to bring the heads of a token together. Capped attention also
/// repeats keys and values for each head, and keeps the scores of all tokens that a token may see:
/// behind tanh, behind softmax in fp32, and in the dtype of compute.
int64_t attention_bytes(const TrainConfig& config, const TokenBytes& token) {
  const auto plain = token.heads + 2 * token.kv_heads +
                     (config.device == "cpu" ? 2 : 1) * token.heads + token.softmax_sums;
  const auto of_score = 4 + (token.element < 4 ? 2 : 1) * token.element;
  return plain + (config.model.attention_cap == 0
                      ? 0
                      : token.num_scores * of_score + 2 * (token.heads - token.kv_heads));
}

/// LoRA keeps the result of A for each projection. Its products have results of two sizes more.
struct LoraBytes {
  LoraBytes(const TrainConfig& config, const TokenBytes& token) {
    const auto lora = Lora::parse(config.model.lora);
    for (const auto& [name, width] : std::initializer_list<std::pair<const char*, int64_t>>{
             {"q_proj", token.heads},
             {"k_proj", token.kv_heads},
             {"v_proj", token.kv_heads},
             {"o_proj", token.wide},
             {"gate_proj", token.hidden},
             {"up_proj", token.hidden},
             {"down_proj", token.wide}}) {
      if (lora && lora->trains(name)) {
        kept += token.element * lora->rank;
        products += width;
      }
    }
  }
  int64_t kept = 0;
  int64_t products = 0;
};

/// See TransformerImpl::mask. There is one for blocks with a window, and with documents one for the
/// others.
int64_t mask_bytes(const TrainConfig& config, const MeshShape& mesh, const PlanFor& what) {
  const auto context = config.context;
  const bool documents = what.documents || config.document_end != "none";
  bool has_sliding = false;
  bool has_whole = false;
  for (int64_t i = 0; i < config.model.layers; ++i) {
    const auto window = config.model.window_of(i);
    (window > 0 && window < context ? has_sliding : has_whole) = true;
  }
  const auto count = (has_sliding ? 1 : 0) + (has_whole && documents ? 1 : 0);
  const auto rows = documents ? tokens_at_once(config, mesh) / context : 1;
  return count * rows * context * aligned_mask_row(context) * element_bytes(config.param_dtype);
}

} // namespace

int64_t element_bytes(const std::string& dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype_of(dtype)));
}

int64_t tokens_at_once(const TrainConfig& config, const MeshShape& mesh) {
  return config.batch / mesh.data_ranks() / config.accumulate * config.context;
}

Activations plan_activations(
    const TrainConfig& config, const MeshShape& mesh, const PlanFor& what) {
  const auto tokens = tokens_at_once(config, mesh);
  const TokenBytes token(config, mesh);
  const LoraBytes lora(config, token);
  const auto norm = norm_bytes(config, token);
  // Norms behind attention and feed-forward part keep less: what comes after them only adds.
  const auto sandwich = config.model.sandwich_norms ? 2 * (norm - token.wide) : 0;
  // Inside of a block, the gradients are the most where those of its output, of silu and of up are
  // there. A product of matrices in 16 bits has one copy more on the CPU. Gradients of scores may
  // be more: there are two of them in fp32, but nothing of the feed-forward part.
  const auto hidden_grads = (config.device == "cpu" && token.element < 4 ? 3 : 2) * token.hidden;
  const auto score_grads = 2 * 4 * token.num_scores - token.swiglu;
  // A product in float8 has a copy of its matrix in float8. A GPU transposes it into another copy.
  // The CPU has matrix and result in fp32.
  const auto in_float8 = config.has_float8() ? (config.device == "cpu" ? 1 + 4 + 4 : 1 + 1) : 0;
  return {
      .block = tokens * (2 * norm + sandwich + qk_norm_bytes(config, token) +
                         attention_bytes(config, token) + lora.kept + token.swiglu),
      .input = tokens * token.wide,
      .matmuls = tokens * (2 * token.heads + 2 * token.kv_heads + token.softmax_sums +
                           2 * token.hidden + 2 * token.wide + lora.kept),
      .more_matmuls = tokens * (token.element * token.num_scores + lora.products),
      .unneeded = tokens * token.wide, // the last product: autograd saves nothing after it
      .in_block = tokens * (token.wide + std::max(hidden_grads, score_grads) +
                            in_float8 * token.hidden / token.element),
      .masks = mask_bytes(config, mesh, what),
      .end = tokens * norm,
      .scores = tokens * 3 * 4 * config.model.vocab / mesh.tensor};
}

KeptOfBlock kept_of_block(const TrainConfig& config, const Activations& act) {
  if (!config.activation_checkpointing) {
    return {.bytes = act.block};
  }
  const auto used =
      std::min(act.matmuls - act.unneeded, config.kept_matmul_bytes() / config.model.layers);
  // A budget learns what backward does not ask for; "all" keeps it.
  const auto unneeded = config.keep_matmuls == "all" ? act.unneeded + act.more_matmuls : 0;
  return {.bytes = act.input + used + unneeded, .again = act.block - act.input - used};
}

} // namespace fsdp::cli
