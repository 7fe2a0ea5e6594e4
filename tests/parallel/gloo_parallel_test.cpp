// Tensor parallelism, alone and under fully_shard, over real processes and gloo.
#include <fsdp/activation_checkpointing.h>

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
      SCOPED_TRACE_OF(sharded);
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

TEST(GlooParallel, ReplicasOfTensorParallelShardsCheckpointed) {
  expect_ranks_pass(4, [] {
    init_process_group({.backend = "gloo"});
    for (const auto& shape : {std::vector<int64_t>{2, 2, 1}, {2, 1, 2}, {1, 2, 2}}) {
      SCOPED_TRACE_OF(shape);
      const auto mesh = init_device_mesh(torch::kCPU, shape, {"replicate", "shard", "tp"});
      auto net = in_double<MLPStack>(5);
      auto reference = in_double<MLPStack>(5);
      parallelize(net, mesh["tp"]);
      for (auto& mlp : net->mlps) {
        apply_activation_checkpointing(mlp);
        fully_shard(mlp, {.mesh = mesh[{"replicate", "shard"}]});
      }
      fully_shard(net, {.mesh = mesh[{"replicate", "shard"}]});
      train_and_compare(net, reference, [&](MLPStack& each, int step) {
        return each(tp_batch(step, {4, 5}, get_rank() / mesh.size("tp"))).sum();
      });
    }
    destroy_process_group();
  });
}

} // namespace
} // namespace fsdp
