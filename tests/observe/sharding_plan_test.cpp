// The plan of a sharded module: what a step then does.
#include <fsdp/debug.h>
#include <fsdp/memory.h>

#include <map>

#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

/// The plan's traffic, by operation and module: how many, and their bytes.
using Traffic = std::map<std::pair<std::string, std::string>, std::pair<int64_t, int64_t>>;

Traffic planned(const ShardingPlan& plan) {
  Traffic traffic;
  for (const auto& group : plan.groups) {
    const auto add = [&](const char* op, int64_t count, int64_t bytes) {
      if (count > 0) {
        traffic[{op, group.module}] = {count, bytes};
      }
    };
    add("all_gather", group.all_gathers, group.all_gather_bytes);
    add("reduce_scatter", group.reduce_scatters, group.reduce_scatter_bytes);
    add("all_reduce", group.all_reduces, group.all_reduce_bytes);
  }
  return traffic;
}

Traffic measured(const CommDebugMode& mode) {
  Traffic traffic;
  for (const auto& call : mode.calls()) {
    auto& [count, bytes] = traffic[{call.op, call.module}];
    ++count;
    bytes += call.bytes;
  }
  return traffic;
}

struct StackImpl : torch::nn::Module {
  StackImpl()
      : first(register_module("first", MLP(6))),
        second(register_module("second", MLP(6))),
        head(register_module("head", linear(6, 5))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return head(second(first(x)));
  }
  MLP first, second;
  Linear head;
};
FSDP_MODULE(Stack);

void check_plan(const FullyShardOptions& options, bool frozen = false) {
  SCOPED_TRACE_OF(options.reshard_after_forward, options.mp_policy, frozen);
  (void)memory_stats(torch::kCPU); // begins to count
  auto net = seeded<Stack>();
  if (frozen) {
    net->second->in_proj->weight.set_requires_grad(false);
  }
  for (auto* layer : {&net->first, &net->second}) {
    fully_shard(*layer, options);
  }
  fully_shard(net, options);
  const auto plan = sharding_plan(net);
  const auto total = plan.total();
  ASSERT_EQ(plan.groups.size(), 3);
  EXPECT_EQ(plan.groups[0].module, "");
  EXPECT_EQ(total.num_params, 10);
  int64_t numel = 0;
  for (const auto& param : seeded<Stack>()->parameters()) {
    numel += param.numel();
  }
  EXPECT_EQ(total.numel, numel);
  EXPECT_EQ(total.shard_bytes, memory_stats(torch::kCPU).shards);
  const CommDebugMode mode;
  net(random_batch(1, {4, 6})).sum().backward();
  EXPECT_EQ(measured(mode), planned(plan));
  EXPECT_EQ(planned(sharding_plan(net)), planned(plan)); // also after a step
}

TEST(ShardingPlan, IsWhatAStepDoes) {
  for (const int n : {1, 2, 3}) {
    run_ranks(n, [](int) {
      check_plan({});
      check_plan({.reshard_after_forward = true});
      check_plan({.reshard_after_forward = false});
      check_plan(
          {.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}},
          /*frozen=*/true);
    });
  }
}

TEST(ShardingPlan, KeepsTheParametersOfTheTopmostShardedModules) {
  run_ranks(2, [](int) {
    auto net = seeded<Stack>();
    fully_shard(net->first);
    fully_shard(net->second);
    const auto plan = sharding_plan(net);
    const CommDebugMode mode;
    net(random_batch(1, {4, 6})).sum().backward();
    EXPECT_EQ(mode.count("all_gather"), plan.total().all_gathers);
    EXPECT_EQ(mode.bytes("all_gather"), plan.total().all_gather_bytes);
    EXPECT_EQ(plan.total().all_gathers, 2);
    EXPECT_THROW((void)sharding_plan(net->head), c10::ValueError);
  });
}

TEST(ShardingPlan, WithNeighbours) {
  run_ranks(4, [](int) { check_plan({.reshard_after_forward = 2}); });
}

TEST(ShardingPlan, WithReplicas) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    check_plan({.mesh = mesh});
    check_plan({.mesh = mesh, .reshard_after_forward = false});
  });
}

TEST(ShardingPlan, ShowsATable) {
  run_ranks(2, [](int) {
    const MetaInit on_meta;
    MLP net(8);
    fully_shard(net);
    EXPECT_EQ(
        sharding_plan(net).str(),
        "module  params  elements  shard MiB  gathered MiB  all-gather MiB  reduce-scatter MiB  "
        "all-reduce MiB\n"
        "(root)       4       552       0.00          0.00       0.00 in 1           0.00 in 1  "
        "             -\n"
        "total        4       552       0.00          0.00       0.00 in 1           0.00 in 1  "
        "             -\n");
  });
}

} // namespace
} // namespace fsdp
