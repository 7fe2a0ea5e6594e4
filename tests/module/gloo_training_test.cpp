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
      auto net = seeded<Transformer>(ModelArgs{.dropout_p = 0});
      auto reference = seeded<Transformer>(ModelArgs{.dropout_p = 0});
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

} // namespace
} // namespace fsdp
