// fully_shard over real processes and gloo.
#include <fsdp/debug.h>

#include "support/processes.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

/// Two modules that each rank may call in another order.
struct SwappedImpl : torch::nn::Module {
  SwappedImpl(int64_t first, int64_t second)
      : a(register_module("a", MLP(first, true, false, first))),
        b(register_module("b", MLP(first, true, false, second))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return swapped ? a(b(x)) : b(a(x));
  }
  MLP a, b;
  bool swapped = false;
};
FSDP_MODULE(Swapped);

TEST(GlooTraining, EqualsTheUnshardedModel) {
  expect_ranks_pass(3, [] {
    init_process_group({.backend = "gloo"});
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE_OF(reshard);
      auto [net, reference] = twins<Transformer>(ModelArgs{.dropout_p = 0});
      for (auto& block : net->blocks) {
        fully_shard(block, {.reshard_after_forward = reshard});
      }
      fully_shard(net, {.reshard_after_forward = reshard});
      CommDebugMode comm;
      train_and_compare(net, reference, [&](Transformer& each, int step) {
        comm.clear();
        return each(random_tokens(step, {2, 16}, 8)).sum();
      });
      EXPECT_EQ(comm.count("reduce_scatter"), 3);
    }
    destroy_process_group();
  });
}

// gloo reads a gather's input when it likes.
TEST(GlooTraining, AnUnusedForwardPrefetchIsNotTakenForNewerWeights) {
  expect_ranks_pass(2, [] {
    init_process_group({.backend = "gloo"});
    auto [net, reference] = twins<DoubleLinear>(8);
    auto first = fully_shard(net->lin1);
    auto second = fully_shard(net->lin2);
    fully_shard(net);
    first.set_modules_to_forward_prefetch({second});
    train_and_compare(
        net, reference,
        [](DoubleLinear& each, int step) {
          each->use_second_linear = step % 2 == 1; // lin2 is prefetched and not used, then used
          auto outputs = each(random_batch(step, {2, 8}));
          return outputs.front().sum() + outputs.back().pow(2).sum();
        },
        4);
    destroy_process_group();
  });
}

// Another thread issues the collectives.
TEST(GlooTraining, InInferenceMode) {
  expect_ranks_pass(2, [] {
    init_process_group({.backend = "gloo"});
    auto [net, reference] = twins<MLP>(6);
    fully_shard(net);
    {
      const c10::InferenceMode inference;
      const auto x = random_batch(0, {2, 6});
      EXPECT_TRUE(near(net(x), reference(x), 1e-5));
    }
    destroy_process_group();
  });
}

// Over gloo, each call is compared before it is made: ranks that differ would end the process.
TEST(GlooTraining, RanksThatCallDifferentModulesGetAnError) {
  expect_ranks_pass(2, [] {
    init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(60)});
    for (const int64_t second : {6, 8}) { // of the same size, and of another one
      auto net = seeded<Swapped>(6, second);
      fully_shard(net->a);
      fully_shard(net->b);
      fully_shard(net);
      for (int step = 0; step < 30; ++step) {
        net(random_batch(step, {2, 6})).sum().backward();
      }
      net->swapped = get_rank() == 1;
      const auto message =
          message_of<CommError>([&] { net(random_batch(0, {2, 6})).sum().backward(); });
      EXPECT_TRUE(contains(message, "the ranks brought different calls: rank 0: all_gather"));
      EXPECT_TRUE(contains(message, "of module 'a'"));
      EXPECT_TRUE(contains(message, "of module 'b'"));
    }
    destroy_process_group();
  });
}

} // namespace
} // namespace fsdp
