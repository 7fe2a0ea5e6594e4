// What sharding asks of the host, in exact numbers per group and step: a guard against becoming
// slower that no clock can upset. A number that has fallen is to be written down here; one that
// has risen needs a reason. `./fsdp bench overhead --operators` lists the operators by name.
#include <ATen/record_function.h>
#include <fsdp/fsdp.h>

#include <map>

#include "runtime/counting_allocator.h"
#include "runtime/event_pool.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

struct Cost {
  int64_t operators = 0;   // ATen calls, also those inside of another
  int64_t allocations = 0; // of tensor memory
  int64_t events = 0;      // made, recorded or waited for
  std::map<std::string, int64_t> by_name = {};
};

thread_local std::map<std::string, int64_t>* counts = nullptr;

Cost cost_of(const std::function<void()>& body) {
  detail::count_cpu_memory();
  Cost cost;
  counts = &cost.by_name;
  const auto handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& fn) {
                                   if (std::string_view(fn.name()).starts_with("aten::")) {
                                     ++(*counts)[fn.name()];
                                   }
                                   return std::unique_ptr<at::ObserverContext>();
                                 }).scopes({at::RecordScope::FUNCTION}));
  const auto events = [] {
    const auto& each = detail::event_operations;
    return each.made + each.records + each.waits;
  };
  cost.allocations = -detail::memory_counter().allocations();
  cost.events = -events();
  body();
  cost.allocations += detail::memory_counter().allocations();
  cost.events += events();
  at::removeCallback(handle);
  for (const auto& [name, count] : cost.by_name) {
    cost.operators += count;
  }
  return cost;
}

struct Case {
  const char* name;
  int64_t mlps_per_group = 1; // of four parameters
  bool bf16 = false;
};

/// So many groups in a row.
struct GroupsImpl : torch::nn::Module {
  GroupsImpl(int64_t groups, int64_t mlps_per_group) {
    for (int64_t i = 0; i < groups; ++i) {
      stacks.push_back(register_module(std::to_string(i), Stack(8, mlps_per_group)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& stack : stacks) {
      x = stack(x);
    }
    return x;
  }
  std::vector<Stack> stacks;
};
FSDP_MODULE(Groups);

/// Of one step, without an optimizer, when all has been made that is made once.
Cost step_cost(int64_t groups, const Case& which, bool sharded) {
  auto net = Groups(groups, which.mlps_per_group);
  if (sharded) {
    FullyShardOptions options{.reshard_after_forward = true};
    if (which.bf16) {
      options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    }
    for (auto& stack : net->stacks) {
      fully_shard(stack, options);
    }
    fully_shard(net, options);
  } else if (which.bf16) {
    net->to(torch::kBFloat16);
  }
  const auto input = torch::ones({2, 8}, which.bf16 ? torch::kBFloat16 : torch::kFloat);
  const auto step = [&] {
    net(input).sum().backward();
    net->zero_grad();
  };
  step();
  step();
  return cost_of(step);
}

/// What one more group adds, sharded and less what it adds to the plain model.
Cost group_cost(const Case& which) {
  constexpr int64_t kFew = 2;
  constexpr int64_t kMany = 6;
  const auto difference = [](const Cost& more, const Cost& less, int64_t parts) {
    Cost result{
        .operators = more.operators - less.operators,
        .allocations = more.allocations - less.allocations,
        .events = more.events - less.events,
        .by_name = more.by_name};
    for (const auto& [name, count] : less.by_name) {
      result.by_name[name] -= count;
    }
    for (auto* number : {&result.operators, &result.allocations, &result.events}) {
      EXPECT_EQ(*number % parts, 0) << "not the same for every group";
      *number /= parts;
    }
    return result;
  };
  const auto added = [&](bool sharded) {
    return difference(
        step_cost(kMany, which, sharded), step_cost(kFew, which, sharded), kMany - kFew);
  };
  return difference(added(true), added(false), 1);
}

std::string list(const Cost& cost) {
  std::string text;
  for (const auto& [name, count] : cost.by_name) {
    text += count != 0 ? c10::str("  ", name, " ", count, " (of 4 groups)\n") : "";
  }
  return text;
}

class HostCost : public testing::Test {
 protected:
  void SetUp() override {
    init_process_group({.backend = "fake", .rank = 0, .world_size = 4});
    at::set_num_threads(1);
  }
  void TearDown() override {
    destroy_process_group();
  }
};

TEST_F(HostCost, PerGroupAndStep) {
  struct Row {
    Case which;
    int64_t operators;
    int64_t allocations;
  };
  // ======================================================================================
  // The numbers. fp32: the gather in backward (empty), the input's view (view_as, view), the output
  // of the reduction (empty), the fake group's copy (2 view, select, as_strided, copy_) and a cast
  // that is none (to). The gather in forward and the input of the reduction take spare memory.
  // bf16: beside these two casts of the shard (2 empty, 2 copy_) and one of the gradients (empty,
  // copy_). None of it for each parameter.
  const std::vector<Row> rows{
      {{.name = "fp32"}, 10, 2},
      {{.name = "fp32, twice the parameters", .mlps_per_group = 2}, 10, 2},
      {{.name = "bf16", .bf16 = true}, 16, 5},
      {{.name = "bf16, twice the parameters", .mlps_per_group = 2, .bf16 = true}, 16, 5},
  };
  // ======================================================================================
  for (const auto& [which, operators, allocations] : rows) {
    SCOPED_TRACE(which.name);
    const auto cost = group_cost(which);
    EXPECT_EQ(cost.operators, operators) << list(cost);
    EXPECT_EQ(cost.allocations, allocations);
    EXPECT_EQ(cost.events, 0); // there are no streams
  }
}

/// One rank has nothing to communicate: backward divides once per gradient, if it must.
TEST(OneRank, DividesOnceAndOnlyByAFactorOtherThanOne) {
  run_ranks(1, [](int) {
    for (const std::optional<double> factor : {std::optional<double>(), {1.0}, {2.0}}) {
      SCOPED_TRACE_OF(factor);
      auto net = seeded<MLP>(8);
      auto root = fully_shard(net);
      if (factor) {
        root.set_gradient_divide_factor(*factor);
      }
      const auto loss = net(torch::ones({3, 8})).sum();
      auto cost = cost_of([&] { loss.backward(); });
      // One division of a tensor by a number makes several records.
      const auto some = torch::ones({2});
      auto division = cost_of([&] { some.div(2.0); });
      const auto divisions =
          factor == 2.0 ? static_cast<int64_t>(unique_parameters(*net).size()) : 0;
      for (const auto* name : {"aten::div", "aten::div_", "aten::mul_", "aten::copy_"}) {
        EXPECT_EQ(cost.by_name[name], divisions * division.by_name[name]) << name;
      }
    }
  });
}

// Flat: a rank more is nothing more to do.
TEST_F(HostCost, IsTheSameForAnyNumberOfRanks) {
  const Case which{.name = "fp32"};
  const auto few = group_cost(which);
  destroy_process_group();
  init_process_group({.backend = "fake", .rank = 0, .world_size = 1024});
  const auto many = group_cost(which);
  EXPECT_EQ(many.operators, few.operators) << list(many);
  EXPECT_EQ(many.allocations, few.allocations);
}

} // namespace
} // namespace fsdp
