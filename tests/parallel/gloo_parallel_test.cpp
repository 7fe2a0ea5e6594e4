// Tensor parallelism, alone and under fully_shard, over real processes and gloo.
#include "parallel/tp_models.h"
#include "support/processes.h"

namespace fsdp {
namespace {

using namespace test;

TEST(GlooParallel, EqualsTheUnshardedModel) {
  expect_ranks_pass(4, [] {
    init_process_group({.backend = "gloo"});
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    for (const bool sharded : {false, true}) {
      const ModelArgs args{.vocab_size = 11, .dropout_p = 0};
      auto net = in_double<Transformer>(args);
      auto reference = in_double<Transformer>(args);
      parallelize(net, mesh["tp"], /*sequence=*/true, /*local_logits=*/true);
      if (sharded) {
        shard_transformer(net, {.mesh = mesh["dp"]});
      }
      train_and_compare(
          net, reference,
          [&](Transformer& each, int step) {
            const auto dp_rank = sharded ? mesh.get_local_rank("dp") : 0;
            const auto tokens = tp_tokens(step, {2, 15}, 11, dp_rank); // uneven
            const auto logits = each(tokens).flatten(0, 1);
            return is_parallel(*each->output)
                       ? parallel_cross_entropy(logits, tokens.flatten(), mesh["tp"])
                       : torch::nn::functional::cross_entropy(logits, tokens.flatten());
          },
          5);
    }
    destroy_process_group();
  });
}

} // namespace
} // namespace fsdp
