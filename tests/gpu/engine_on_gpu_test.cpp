// The engine on a GPU: many ranks on one device, each with its own streams.
#include <fsdp/debug.h>

#include "runtime/stream.h"
#include "support/gpu.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

class EngineOnGpu : public testing::TestWithParam<int> {};

torch::Tensor loss_of(Transformer& net, int step) {
  return net(random_tokens(step, {2, 16}, 8)).sum(); // on the CPU: the root moves it
}

TEST_P(EngineOnGpu, TrainsLikeTheUnshardedModel) {
  SKIP_WITHOUT_GPU();
  run_ranks(GetParam(), [](int) {
    const auto mesh = init_device_mesh(torch::kCUDA, {get_world_size()});
    for (const ReshardAfterForward& reshard :
         {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(),
          ReshardAfterForward(2)}) {
      const ModelArgs args{.n_layers = 3, .dropout_p = 0};
      auto net = seeded<Transformer>(args);
      auto reference = seeded<Transformer>(args);
      reference->to(torch::kCUDA);
      const FullyShardOptions options{.mesh = mesh, .reshard_after_forward = reshard};
      for (auto& block : net->blocks) {
        fully_shard(block, options); // moves it
      }
      auto root = fully_shard(net, options);
      root.set_reduce_scatter_max_input_buffers(2);
      train_and_compare(net, reference, [&](Transformer& each, int step) {
        return each.get() == net.get() ? loss_of(each, step)
                                       : each(random_tokens(step, {2, 16}, 8).cuda()).sum();
      });
    }
  });
}

TEST_P(EngineOnGpu, PrefetchesAndKeepsTheOrderOfEvents) {
  SKIP_WITHOUT_GPU();
  run_ranks(GetParam(), [](int) {
    const auto mesh = init_device_mesh(torch::kCUDA, {get_world_size()});
    auto net = seeded<Stack>(12, 4);
    auto reference = seeded<Stack>(12, 4);
    reference->to(torch::kCUDA);
    std::vector<FSDPModule> mlps;
    for (auto& mlp : net->mlps) {
      mlps.push_back(fully_shard(mlp, {.mesh = mesh}));
    }
    auto root = fully_shard(net, {.mesh = mesh});
    for (size_t i = 0; i + 1 < mlps.size(); ++i) {
      mlps[i].set_modules_to_forward_prefetch({mlps[i + 1]});
    }
    train_and_compare(
        net, reference,
        [&](Stack& each, int step) {
          c10::Event event(c10::DeviceType::CUDA);
          event.record(detail::current_stream(reference->mlps[0]->in_proj->weight.device()));
          root.set_post_optim_event(std::move(event));
          return each(random_batch(step, {4, 12}).cuda()).pow(2).sum();
        },
        10);
    CommDebugMode comm;
    EventLog log;
    net(random_batch(0, {4, 12}).cuda()).sum().backward();
    EXPECT_EQ(comm.count("all_gather"), 8);
    EXPECT_EQ(comm.count("reduce_scatter"), 4);
    EXPECT_EQ(log.events().size(), 4u + 4u + 4u + 4u + 4u);
  });
}

INSTANTIATE_TEST_SUITE_P(
    WorldSizes, EngineOnGpu, testing::Values(2, 4, 8), testing::PrintToStringParamName());

} // namespace
} // namespace fsdp
