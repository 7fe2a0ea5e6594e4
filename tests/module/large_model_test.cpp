// A model that no machine here could hold, as one of the 1024 ranks sees it.
#include <fsdp/distributed.h>
#include <fsdp/fully_shard.h>
#include <fsdp/meta_init.h>
#include <fsdp/nn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <string>

#include "module/module_tree.h"
#include "support/models.h"

namespace fsdp {
namespace {

using test::linear;
using test::Linear;

constexpr int64_t kLayers = 80, kDim = 8192, kHeads = 64, kKvHeads = 8, kHidden = 28672,
                  kVocab = 128256;
constexpr int kRanks = 1024, kRank = 7;
constexpr int64_t kMiB = 1 << 20;

struct LayerImpl : torch::nn::Module {
  LayerImpl()
      : attention_norm(register_module("attention_norm", nn::RMSNorm(kDim))),
        wq(register_module("wq", linear(kDim, kDim, false))),
        wk(register_module("wk", linear(kDim, kDim / kHeads * kKvHeads, false))),
        wv(register_module("wv", linear(kDim, kDim / kHeads * kKvHeads, false))),
        wo(register_module("wo", linear(kDim, kDim, false))),
        ffn_norm(register_module("ffn_norm", nn::RMSNorm(kDim))),
        w1(register_module("w1", linear(kDim, kHidden, false))),
        w2(register_module("w2", linear(kHidden, kDim, false))),
        w3(register_module("w3", linear(kDim, kHidden, false))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const auto heads = [&](const torch::Tensor& t) {
      return t.view({x.size(0), x.size(1), -1, kDim / kHeads}).transpose(1, 2);
    };
    const auto normed = attention_norm(x);
    const auto attended = torch::scaled_dot_product_attention(
        heads(wq(normed)), heads(wk(normed)), heads(wv(normed)), {}, 0, /*is_causal=*/true, {},
        /*enable_gqa=*/true);
    const auto h = x + wo(attended.transpose(1, 2).reshape(x.sizes()));
    const auto gated = ffn_norm(h);
    return h + w2(torch::silu(w1(gated)) * w3(gated));
  }
  nn::RMSNorm attention_norm;
  Linear wq, wk, wv, wo;
  nn::RMSNorm ffn_norm;
  Linear w1, w2, w3;
};
FSDP_MODULE(Layer);

struct LlamaImpl : torch::nn::Module {
  LlamaImpl()
      : tok_embeddings(register_module("tok_embeddings", test::Embedding(kVocab, kDim))),
        layers(register_module("layers", torch::nn::ModuleList())) {
    for (int64_t i = 0; i < kLayers; ++i) {
      blocks.emplace_back();
      layers->push_back(blocks.back());
    }
    norm = register_module("norm", nn::RMSNorm(kDim));
    output = register_module("output", linear(kDim, kVocab, false));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto h = tok_embeddings(tokens);
    for (auto& block : blocks) {
      h = block(h);
    }
    return output(norm(h));
  }
  test::Embedding tok_embeddings;
  torch::nn::ModuleList layers;
  std::vector<Layer> blocks; // those in `layers`, by their type
  nn::RMSNorm norm{nullptr};
  Linear output{nullptr};
};
FSDP_MODULE(Llama);

/// The most that this process has had in memory so far.
int64_t peak_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmHWM:") {
      int64_t kib = 0;
      status >> kib;
      return kib * 1024;
    }
  }
  ADD_FAILURE() << "/proc/self/status has no VmHWM";
  return 0;
}

struct FakeWorld {
  FakeWorld() {
    init_process_group({.backend = "fake", .rank = kRank, .world_size = kRanks});
  }
  ~FakeWorld() {
    destroy_process_group();
  }
};

TEST(LargeModel, SeventyBillionParametersTakeOneRanksShare) {
  const auto begin = std::chrono::steady_clock::now();
  const FakeWorld world;
  auto net = [] {
    const MetaInit meta;
    return Llama();
  }();
  int64_t num_params = 0, padded_bytes = 0;
  for (const auto& param : net->parameters()) {
    num_params += param.numel();
    const auto rows = (param.size(0) + kRanks - 1) / kRanks;
    padded_bytes += rows * (param.numel() / param.size(0)) * 4;
  }
  EXPECT_GT(num_params, 70'000'000'000);
  EXPECT_LT(num_params, 71'000'000'000);
  for (auto& block : net->blocks) {
    fully_shard(block);
  }
  fully_shard(net);
  EXPECT_LT(peak_bytes(), 1024 * kMiB); // libtorch and 723 descriptions of tensors

  to_empty(net, torch::kCPU);
  int64_t bytes = 0;
  for (const auto& param : net->parameters()) {
    EXPECT_TRUE(param.is_cpu());
    bytes += static_cast<int64_t>(param.nbytes());
  }
  EXPECT_EQ(bytes, padded_bytes); // an early rank: its shards are full
  EXPECT_GE(bytes, num_params * 4 / kRanks);
  EXPECT_LT(bytes, num_params * 4 / kRanks * 101 / 100); // 1%: 128256 rows over 1024 ranks

  // What the first forward does before it gathers.
  int64_t held = 0;
  for (const auto& node : detail::subtree_of(*net).nodes) {
    for (const auto& group : node.state->groups()) {
      group->lazy_init();
      held += static_cast<int64_t>(group->params().front()->sharded().storage().nbytes());
    }
  }
  EXPECT_EQ(held, bytes); // one buffer for all parameters of a group
  EXPECT_LT(peak_bytes(), 2048 * kMiB);
  // A limit, not a measurement: it takes a few seconds.
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

} // namespace
} // namespace fsdp
