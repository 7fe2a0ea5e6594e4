// Shards in host memory, compute on a GPU: many ranks on one device.
#include <fsdp/debug.h>

#include "support/gpu.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

class OffloadOnGpu : public testing::TestWithParam<int> {};

/// Sees its parameters on the GPU, whatever they are between calls.
struct SeeingImpl : MLPImpl {
  using MLPImpl::MLPImpl;
  torch::Tensor forward(const torch::Tensor& x) {
    EXPECT_TRUE(x.is_cuda());
    for (const auto& param : parameters()) {
      EXPECT_TRUE(param.is_cuda());
    }
    EXPECT_EQ(in_proj->weight.sizes(), (std::vector<int64_t>{24, 6}));
    return MLPImpl::forward(x);
  }
};

struct SeeingNetImpl : torch::nn::Module {
  SeeingNetImpl() : head(register_module("head", linear(6, 3))) {
    for (int i = 0; i < 3; ++i) {
      mlps.push_back(register_module("mlp" + std::to_string(i), Holder<SeeingImpl>(6)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& mlp : mlps) {
      x = x + mlp(x);
    }
    EXPECT_TRUE(head->weight.is_cuda());
    return head(x);
  }
  std::vector<Holder<SeeingImpl>> mlps;
  Linear head;
};
FSDP_MODULE(SeeingNet);

void shard_net(SeeingNet& net, const ReshardAfterForward& reshard, bool pin_memory) {
  const FullyShardOptions options{
      .mesh = init_device_mesh(torch::kCUDA, {get_world_size()}),
      .reshard_after_forward = reshard,
      .offload_policy = CPUOffloadPolicy{.pin_memory = pin_memory}};
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, options);
  }
  fully_shard(net, options);
}

torch::Tensor loss_of(SeeingNet& net, int step) {
  return net(random_batch(step, {4, 6}).cuda()).pow(2).sum();
}

/// A copy of `reference` in host memory, with its gradients: what shards there
/// are compared with.
SeeingNet on_the_host(const SeeingNet& reference) {
  auto copy = seeded<SeeingNet>();
  const auto from = reference->named_parameters();
  for (const auto& item : copy->named_parameters()) {
    const auto& param = from[item.key()];
    item.value().set_data(param.detach().cpu());
    item.value().mutable_grad() = param.grad().defined() ? param.grad().cpu() : torch::Tensor();
  }
  return copy;
}

/// Between steps.
void expect_on_the_host(const SeeingNet& net, bool pin_memory) {
  for (const auto& item : net->named_parameters()) {
    const auto& param = item.value();
    EXPECT_TRUE(param.is_cpu()) << item.key();
    EXPECT_TRUE(param.numel() == 0 || param.is_pinned() == pin_memory) << item.key();
    EXPECT_TRUE(as_dtensor(param).to_local().is_cpu()) << item.key();
    EXPECT_EQ(as_dtensor(param).device_mesh().device_type(), c10::DeviceType::CUDA);
    EXPECT_TRUE(!param.grad().defined() || param.grad().is_cpu()) << item.key();
  }
}

// Optimizers run on the host here and on the GPU there.
constexpr double kTolerance = 1e-5;

/// `microbatches` per step, reduced with each or with the last.
void train_on_both(
    SeeingNet& net, SeeingNet& reference, bool pin_memory, int microbatches, bool sync_each) {
  auto root = FSDPModule::of(net);
  torch::optim::AdamW sharded_optimizer(net->parameters(), 1e-2);
  torch::optim::AdamW optimizer(reference->parameters(), 1e-2);
  for (int step = 0; step < 4; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    expect_on_the_host(net, pin_memory);
    for (int i = 0; i < microbatches; ++i) {
      loss_of(reference, 10 * step + i).backward();
    }
    average_gradients(*reference);
    const auto expected = on_the_host(reference);
    CommDebugMode comm;
    for (int i = 0; i < microbatches; ++i) {
      const bool last = i == microbatches - 1;
      root.set_requires_gradient_sync(sync_each || last);
      root.set_is_last_backward(last);
      loss_of(net, 10 * step + i).backward();
    }
    // At once, without any synchronisation: they are final.
    expect_parity(*net, *expected, kTolerance);
    expect_on_the_host(net, pin_memory);
    EXPECT_EQ(comm.count("reduce_scatter"), sync_each ? 4 * microbatches : 4);
    sharded_optimizer.step();
    optimizer.step();
    expect_parity(*net, *on_the_host(reference), kTolerance);
    for (const auto& param : net->parameters()) {
      const auto& state = static_cast<const torch::optim::AdamWParamState&>(
          *sharded_optimizer.state().at(param.unsafeGetTensorImpl()));
      EXPECT_TRUE(state.exp_avg().is_cpu());
    }
    sharded_optimizer.zero_grad(step % 2 == 0);
    optimizer.zero_grad(step % 2 == 0);
  }
}

TEST_P(OffloadOnGpu, TrainsLikeTheUnshardedModel) {
  SKIP_WITHOUT_GPU();
  run_ranks(GetParam(), [](int) {
    for (const bool pin_memory : {true, false}) {
      for (const ReshardAfterForward& reshard :
           {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(),
            ReshardAfterForward(2)}) {
        SCOPED_TRACE_OF(pin_memory, reshard);
        auto [net, reference] = twins<SeeingNet>();
        reference->to(torch::kCUDA);
        shard_net(net, reshard, pin_memory);
        train_on_both(net, reference, pin_memory, 1, true);
      }
    }
  });
}

TEST_P(OffloadOnGpu, AccumulatesWithAndWithoutCommunication) {
  SKIP_WITHOUT_GPU();
  run_ranks(GetParam(), [](int) {
    for (const bool pin_memory : {true, false}) {
      for (const bool sync_each : {true, false}) {
        SCOPED_TRACE_OF(pin_memory, sync_each);
        auto [net, reference] = twins<SeeingNet>();
        reference->to(torch::kCUDA);
        shard_net(net, true, pin_memory);
        train_on_both(net, reference, pin_memory, 3, sync_each);
      }
    }
  });
}

// Made on the GPU, they are moved to the host by sharding.
TEST_P(OffloadOnGpu, TakesParametersFromTheGpu) {
  SKIP_WITHOUT_GPU();
  run_ranks(GetParam(), [](int) {
    auto [net, reference] = twins<SeeingNet>();
    net->to(torch::kCUDA);
    reference->to(torch::kCUDA);
    shard_net(net, {}, true);
    train_on_both(net, reference, true, 1, true);
  });
}

TEST_P(OffloadOnGpu, HooksSeeTheReducedGradientOnTheHost) {
  SKIP_WITHOUT_GPU();
  run_ranks(GetParam(), [](int) {
    auto [net, reference] = twins<SeeingNet>();
    reference->to(torch::kCUDA);
    shard_net(net, {}, true);
    loss_of(reference, 0).backward();
    average_gradients(*reference);
    const auto expected = on_the_host(reference);
    const auto whole = expected->named_parameters();
    int calls = 0;
    for (const auto& item : net->named_parameters()) {
      register_post_accumulate_grad_hook(
          item.value(), [&, name = item.key()](const torch::Tensor& param) {
            ++calls;
            EXPECT_TRUE(near(param.grad(), part_of(whole[name].grad(), param), kTolerance));
          });
    }
    loss_of(net, 0).backward();
    EXPECT_EQ(calls, 3 * 4 + 2);
  });
}

TEST_P(OffloadOnGpu, ParametersThatSomebodyMovedToTheGpuAreNamed) {
  SKIP_WITHOUT_GPU();
  run_ranks(GetParam(), [](int) {
    auto net = seeded<SeeingNet>();
    shard_net(net, {}, true);
    net->to(torch::kCUDA);
    for (int attempt = 0; attempt < 2; ++attempt) {
      const auto message = message_of<c10::Error>([&] { loss_of(net, 0); });
      EXPECT_TRUE(contains(message, "materialized on CPU when enabling CPU offloading"));
      EXPECT_TRUE(
          contains(message, "non-CPU device: [('head.weight'") ||
          contains(message, "non-CPU device: [('mlp0.in_proj.weight'"));
    }
    auto reference = seeded<SeeingNet>();
    reference->to(torch::kCUDA);
    net->to(torch::kCPU); // back again, and it works
    loss_of(net, 0).backward();
    loss_of(reference, 0).backward();
    average_gradients(*reference);
    expect_parity(*net, *on_the_host(reference), kTolerance);
  });
}

INSTANTIATE_TEST_SUITE_P(
    WorldSizes, OffloadOnGpu, testing::Values(2, 4), testing::PrintToStringParamName());

} // namespace
} // namespace fsdp
