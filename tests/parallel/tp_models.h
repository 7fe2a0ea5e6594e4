#pragma once

// Models of upstream's tests of tensor parallelism, with its plans for them.

#include <fsdp/debug.h>
#include <fsdp/parallel_cross_entropy.h>
#include <fsdp/redistribute.h>
#include <fsdp/tensor_parallel.h>

#include "support/sharded.h"

namespace fsdp::test {

/// In double, so that sums in another order do not show after steps of Adam.
template <class Holder, class... Args>
Holder in_double(const Args&... args) {
  auto module = seeded<Holder>(args...);
  module->to(torch::kDouble);
  return module;
}

/// The same on every rank of the tensor parallel axis: they share their input.
inline torch::Tensor tp_batch(int step, at::IntArrayRef sizes, int64_t dp_rank = 0) {
  return torch::randn(sizes, generator(1000 * step + dp_rank), torch::kDouble).to(test_device());
}
inline torch::Tensor tp_tokens(
    int step, at::IntArrayRef sizes, int64_t vocab_size, int64_t dp_rank = 0) {
  return torch::randint(vocab_size, sizes, generator(1000 * step + dp_rank), torch::kLong)
      .to(test_device());
}

inline bool is_parallel(const Hookable& module) {
  return !module.fsdp_hooks.empty();
}

inline ParallelPlan mlp_plan(const Placement& output = Replicate{}) {
  return {{"in_proj", ColwiseParallel{}}, {"out_proj", RowwiseParallel{.output_layouts = output}}};
}

/// Three MLPs, the middle one wider; with sequence parallelism a norm behind.
struct MLPStackImpl : torch::nn::Module {
  explicit MLPStackImpl(int64_t dim, bool with_seq_parallel = false) {
    for (int64_t i = 0; i < 3; ++i) {
      mlps.push_back(register_module(std::to_string(i), MLP(dim, true, false, i == 1 ? 4 : 3)));
    }
    if (with_seq_parallel) {
      norm = register_module("3", layer_norm(dim));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& mlp : mlps) {
      x = mlp(x);
    }
    return norm ? norm(x) : x;
  }
  std::vector<MLP> mlps;
  LayerNorm norm{nullptr};
};
FSDP_MODULE(MLPStack);

inline void parallelize(MLPStack& net, const DeviceMesh& tp) {
  std::vector<ParallelPlan::Entry> plan{
      {"[0-2].in_proj", ColwiseParallel{.use_local_output = false}},
      {"[01].out_proj", RowwiseParallel{.use_local_output = false}},
      {"2.out_proj",
       RowwiseParallel{.output_layouts = net->norm ? Placement(Shard{1}) : Replicate{}}}};
  if (net->norm) {
    plan.emplace_back("3", SequenceParallel{.sequence_dim = 1});
  }
  parallelize_module(net, tp, plan);
}

/// Upstream's Transformer.parallelize, with local outputs for attention. With
/// `local_logits` the classes stay divided.
inline void parallelize(
    Transformer& net, const DeviceMesh& tp, bool sequence, bool local_logits = false) {
  const Placement seq = sequence ? Placement(Shard{1}) : Replicate{};
  std::vector<ParallelPlan::Entry> plan{
      {"tok_embeddings", RowwiseParallel{.input_layouts = Replicate{}, .output_layouts = seq}},
      {"pos_embeddings",
       RowwiseParallel{
           .input_layouts = Replicate{},
           .output_layouts = sequence ? Placement(Shard{0}) : Replicate{}}},
      {"layers.*.attention.w[qkv]", ColwiseParallel{}},
      {"layers.*.attention.wo", RowwiseParallel{.output_layouts = seq}},
      {"layers.*.feed_forward.w1", ColwiseParallel{.input_layouts = seq}},
      {"layers.*.feed_forward.w2", RowwiseParallel{.output_layouts = seq}},
      {"output", ColwiseParallel{
                     .input_layouts = seq,
                     .output_layouts = local_logits ? Placement(Shard{-1}) : Replicate{}}}};
  if (sequence) {
    plan.emplace_back(
        "layers.*.attention",
        PrepareModuleInput{.input_layouts = Shard{1}, .desired_input_layouts = Replicate{}});
    plan.emplace_back("layers.*.*_norm", SequenceParallel{});
    plan.emplace_back("norm", SequenceParallel{});
  }
  parallelize_module(net, tp, plan);
  for (auto& block : net->blocks) {
    block->attention->args.n_heads /= tp.size();
  }
}

} // namespace fsdp::test
