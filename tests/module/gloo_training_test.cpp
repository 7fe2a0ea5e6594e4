// fully_shard over real processes and gloo.
#include <fsdp/debug.h>

#include "support/processes.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

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

} // namespace
} // namespace fsdp
