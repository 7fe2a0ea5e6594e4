// Shards in host memory, on a mesh of hosts: there is nowhere else to be, and
// nothing may change.
#include <fsdp/debug.h>

#include "module/by_hand.h"

namespace fsdp {
namespace {

using namespace test;

const std::vector<ReshardAfterForward> kReshards{true, false, 2};

/// Parameters, gradients and what as_dtensor says are in host memory.
void expect_on_the_host(const torch::nn::Module& net) {
  for (const auto& param : net.parameters()) {
    EXPECT_TRUE(param.is_cpu());
    EXPECT_TRUE(as_dtensor(param).to_local().is_cpu());
    EXPECT_EQ(as_dtensor(param).device_mesh().device_type(), c10::DeviceType::CPU);
    EXPECT_TRUE(as_dtensor_grad(param).to_local().is_cpu());
  }
}

TEST(Offload, TrainsLikeTheUnshardedModel) {
  for (const int n : {2, 4}) {
    run_ranks(n, [](int) {
      for (const bool pin_memory : {true, false}) {
        for (const auto& reshard : kReshards) {
          SCOPED_TRACE_OF(pin_memory, reshard);
          auto [net, reference] = twins<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0});
          shard_transformer(
              net, {.reshard_after_forward = reshard,
                    .offload_policy = CPUOffloadPolicy{.pin_memory = pin_memory}});
          train_and_compare(net, reference, transformer_loss, 3);
          transformer_loss(net, 0).backward();
          expect_on_the_host(*net);
        }
      }
    });
  }
}

TEST(Offload, WithAndWithoutAPolicyToTheBit) {
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [n](int) {
      for (const MixedPrecisionPolicy& policy :
           {MixedPrecisionPolicy{}, MixedPrecisionPolicy{.param_dtype = kBf16},
            MixedPrecisionPolicy{.param_dtype = kBf16, .reduce_dtype = kFp32},
            MixedPrecisionPolicy{.param_dtype = kFp16, .output_dtype = kFp32}}) {
        for (const auto& reshard : kReshards) {
          SCOPED_TRACE_OF(policy, reshard);
          if (n == 1 && &reshard == &kReshards.back()) {
            continue; // does not divide
          }
          auto net = seeded<Stack>(16);
          auto reference = by_hand<Stack>(policy, 16);
          const auto recorder = shard_stack(
              net, {.reshard_after_forward = reshard,
                    .mp_policy = policy,
                    .offload_policy = CPUOffloadPolicy{}});
          train_by_hand(
              net, reference, {4, 16},
              [&](Stack& each, const torch::Tensor& x) {
                const auto y = each(x);
                return (y.to(policy.output_dtype.value_or(y.scalar_type())) - 1).pow(2).mean();
              },
              5);
          const auto wire = policy.reduce_dtype.value_or(policy.param_dtype.value_or(kFp32));
          EXPECT_EQ(recorder->dtypes, std::vector<at::ScalarType>(n > 1 ? 3 * 5 : 0, wire));
        }
      }
    });
  }
}

TEST(Offload, AccumulatesWithAndWithoutCommunication) {
  for (const int n : {1, 2}) {
    run_ranks(n, [n](int) {
      for (const bool sync_each : {true, false}) {
        for (const bool reshard : {true, false}) {
          for (const MixedPrecisionPolicy& policy :
               {MixedPrecisionPolicy{},
                MixedPrecisionPolicy{.param_dtype = kBf16, .reduce_dtype = kFp32}}) {
            SCOPED_TRACE_OF(sync_each, reshard, policy);
            auto net = seeded<Stack>(16);
            auto reference = by_hand<Stack>(policy, 16);
            shard_stack(
                net, {.reshard_after_forward = reshard,
                      .mp_policy = policy,
                      .offload_policy = CPUOffloadPolicy{}});
            auto root = FSDPModule::of(net);
            SideBySide<Stack> both(net, reference);
            for (int step = 0; step < 3; ++step) {
              CommDebugMode comm;
              int reductions = 0;
              for (int microbatch = 0; microbatch < 3; ++microbatch) {
                const bool last = microbatch == 2;
                root.set_requires_gradient_sync(sync_each || last);
                root.set_reshard_after_backward(last || reshard);
                const auto x = random_batch(10 * step + microbatch, {4, 16});
                reference.gather();
                kSquares(net, x).backward();
                kSquares(reference.compute, reference.input(x)).backward();
                reductions = comm.count("reduce_scatter");
                reference.accumulate();
                if (sync_each && !last) {
                  reference.reduce(); // into master's gradients, each by itself
                }
              }
              EXPECT_EQ(reductions, n == 1 ? 0 : sync_each ? 9 : 3);
              both.step();
            }
          }
        }
      }
    });
  }
}

// When backward returns, gradients are final; so they are in the hooks before.
TEST(Offload, GradientsAreFinalWhenBackwardReturns) {
  run_ranks(2, [](int) {
    for (const bool pin_memory : {true, false}) {
      SCOPED_TRACE_OF(pin_memory);
      auto net = seeded<Stack>(16);
      auto reference = by_hand<Stack>({}, 16);
      shard_stack(net, {.offload_policy = CPUOffloadPolicy{.pin_memory = pin_memory}});
      std::map<std::string, torch::Tensor> in_hook;
      for (const auto& item : net->named_parameters()) {
        register_post_accumulate_grad_hook(
            item.value(), [&, name = item.key()](const torch::Tensor& param) {
              EXPECT_TRUE(param.is_cpu() && param.grad().is_cpu());
              EXPECT_FALSE(in_hook.contains(name));
              in_hook[name] = param.grad().clone();
            });
      }
      const auto x = random_batch(0, {4, 16});
      reference.gather();
      kSquares(reference.compute, x).backward();
      reference.accumulate();
      reference.reduce();
      kSquares(net, x).backward();
      const auto whole = reference.master->named_parameters();
      for (const auto& item : net->named_parameters()) {
        const auto expected = part_of(whole[item.key()].grad(), item.value()).contiguous();
        EXPECT_SAME(item.value().grad(), expected);
        EXPECT_SAME(in_hook.at(item.key()), expected);
      }
      expect_on_the_host(*net);
    }
  });
}

// Whatever somebody puts there on the host is adopted, as without offload.
TEST(Offload, ModuleToAndAssignedData) {
  run_ranks(2, [](int) {
    const MixedPrecisionPolicy policy{.param_dtype = kBf16, .reduce_dtype = kFp32};
    auto net = seeded<Stack>(16);
    auto reference = by_hand<Stack>(policy, 16);
    shard_stack(net, {.mp_policy = policy, .offload_policy = CPUOffloadPolicy{}});
    train_by_hand(net, reference, {4, 16}, kSquares, 1);
    net->zero_grad();
    reference.master->zero_grad();
    net->to(kFp64);
    reference.master->to(kFp64);
    const auto fresh = torch::randn({64, 16}, generator(5)).to(kFp64).div(4);
    auto& weight = net->mlps[1]->in_proj->weight;
    weight.set_data(part_of(fresh, weight).clone());
    reference.master->mlps[1]->in_proj->weight.set_data(fresh.clone());
    train_by_hand(net, reference, {4, 16}, kSquares, 3);
    EXPECT_EQ(weight.scalar_type(), kFp64);
  });
}

} // namespace
} // namespace fsdp
