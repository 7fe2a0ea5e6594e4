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
      SCOPED_TRACE_OF(reshard);
      const ModelArgs args{.n_layers = 3, .dropout_p = 0};
      auto [net, reference] = twins<Transformer>(args);
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
    auto [net, reference] = twins<Stack>(12, 4);
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

// ------------------------------------------------------------ What is moved

struct ManyInputsImpl : torch::nn::Module {
  ManyInputsImpl() : mlp(register_module("mlp", MLP(4, true, /*with_buffer=*/true))) {}
  torch::Tensor forward(const std::map<std::string, std::vector<torch::Tensor>>& inputs) {
    torch::Tensor sum;
    for (const auto& [name, tensors] : inputs) {
      for (const auto& tensor : tensors) {
        EXPECT_TRUE(tensor.is_cuda()) << name;
        sum = sum.defined() ? sum + mlp(tensor) : mlp(tensor);
      }
    }
    return sum;
  }
  MLP mlp;
};
FSDP_MODULE(ManyInputs);

TEST(MovedToGpu, InputsParametersAndBuffersByTheRoot) {
  SKIP_WITHOUT_GPU();
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(torch::kCUDA, {2});
    auto net = seeded<ManyInputs>();
    fully_shard(net->mlp, {.mesh = mesh});
    EXPECT_TRUE(net->mlp->buffer.is_cuda());
    fully_shard(net, {.mesh = mesh});
    const std::map<std::string, std::vector<torch::Tensor>> inputs{
        {"a", {random_batch(0, {2, 4}), random_batch(1, {2, 4})}},
        {"b", {random_batch(2, {2, 4})}}};
    net(inputs).sum().backward();
    for (const auto& param : net->parameters()) {
      EXPECT_TRUE(param.is_cuda());
      EXPECT_TRUE(param.grad().is_cuda());
    }
  });
}

TEST(MovedToGpu, IgnoredParametersOnlyByTheUser) {
  SKIP_WITHOUT_GPU();
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(4);
    fully_shard(
        net,
        {.mesh = init_device_mesh(torch::kCUDA, {2}), .ignored_params = {net->out_proj->bias}});
    EXPECT_TRUE(net->out_proj->bias.is_cpu());
    EXPECT_TRUE(net->in_proj->weight.is_cuda());
    net->to(torch::kCUDA);
    EXPECT_TRUE(net->out_proj->bias.is_cuda());
    net(random_batch(0, {2, 4})).sum().backward();
    EXPECT_EQ(net->out_proj->bias.grad().sizes(), (std::vector<int64_t>{4}));
  });
}

INSTANTIATE_TEST_SUITE_P(
    WorldSizes, EngineOnGpu, testing::Values(2, 4, 8), testing::PrintToStringParamName());

} // namespace
} // namespace fsdp
