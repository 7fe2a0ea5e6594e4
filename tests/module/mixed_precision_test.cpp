// Dtypes of parameters and gradients under a policy, next to the same written out
// by hand: bit for bit.
#include <fsdp/debug.h>

#include <set>

#include "module/by_hand.h"

namespace fsdp {
namespace {

using namespace test;

std::optional<ShardPlacement> largest_dim(const std::string&, const torch::Tensor& param) {
  return Shard{param.dim() > 1 && param.size(1) > param.size(0) ? 1 : 0};
}

/// Every way to keep the parameters; on two ranks, to divide them too.
std::vector<FullyShardOptions> layouts(const MixedPrecisionPolicy& policy) {
  std::vector<FullyShardOptions> all;
  const int n = get_world_size();
  for (const ReshardAfterForward& reshard :
       {ReshardAfterForward(false), ReshardAfterForward(true),
        ReshardAfterForward(n % 2 == 0 ? 2 : n)}) {
    all.push_back({.reshard_after_forward = reshard, .mp_policy = policy});
    if (n == 2) {
      all.push_back(all.back());
      all.back().shard_placement_fn = largest_dim;
    }
  }
  return all;
}

/// Three MLPs for ten steps, reduced in the dtype `wire`.
void train_stack(const MixedPrecisionPolicy& policy, at::ScalarType wire) {
  for (const auto& options : layouts(policy)) {
    SCOPED_TRACE_OF(policy, options.reshard_after_forward, bool(options.shard_placement_fn));
    auto net = seeded<Stack>(16);
    auto reference = by_hand<Stack>(policy, 16);
    const auto recorder = shard_stack(net, options);
    train_by_hand(net, reference, {4, 16}, kSquares);
    EXPECT_EQ(
        recorder->dtypes, std::vector<at::ScalarType>(get_world_size() > 1 ? 3 * 10 : 0, wire));
  }
}

// ------------------------------------------------------------ Compute and reduction

TEST(MixedPrecision, ComputesAndReducesInTheParamDtype) {
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [](int) {
      for (const auto dtype : {kBf16, kFp16}) {
        train_stack({.param_dtype = dtype}, dtype);
      }
    });
  }
}

TEST(MixedPrecision, ReducesInFp32) {
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [](int) { train_stack({.param_dtype = kBf16, .reduce_dtype = kFp32}, kFp32); });
  }
}

TEST(MixedPrecision, ReducesIn16Bits) {
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [](int) {
      train_stack({.reduce_dtype = kBf16}, kBf16);
      train_stack({.reduce_dtype = kFp16}, kFp16);
    });
  }
}

TEST(MixedPrecision, DividesAsAskedInEveryReduceDtype) {
  run_ranks(4, [](int) {
    for (const MixedPrecisionPolicy& policy :
         {MixedPrecisionPolicy{.param_dtype = kBf16}, MixedPrecisionPolicy{.param_dtype = kFp16},
          MixedPrecisionPolicy{.param_dtype = kBf16, .reduce_dtype = kFp32}}) {
      for (const double factor : {8.0, 4.0, 2.0}) {
        SCOPED_TRACE_OF(policy, factor);
        auto net = seeded<Stack>(16);
        auto reference = by_hand<Stack>(policy, 16);
        shard_stack(net, {.mp_policy = policy});
        for (auto& mlp : net->mlps) {
          FSDPModule::of(mlp).set_gradient_divide_factor(factor);
        }
        FSDPModule::of(net).set_reduce_scatter_max_input_buffers(2);
        reference.factor = factor;
        train_by_hand(net, reference, {4, 16}, kSquares, 3);
      }
    }
  });
}

TEST(MixedPrecision, AccumulatesInTheReduceDtype) {
  for (const int n : {1, 2}) {
    run_ranks(n, [n](int) {
      for (const auto& [reduce_dtype, wire] :
           std::vector<std::pair<std::optional<at::ScalarType>, at::ScalarType>>{
               {kFp32, kFp32}, {std::nullopt, kBf16}}) {
        for (const bool reshard : {true, false}) {
          SCOPED_TRACE_OF(reduce_dtype, reshard);
          const MixedPrecisionPolicy policy{.param_dtype = kBf16, .reduce_dtype = reduce_dtype};
          auto net = seeded<Stack>(16);
          auto reference = by_hand<Stack>(policy, 16);
          const auto recorder =
              shard_stack(net, {.reshard_after_forward = reshard, .mp_policy = policy});
          auto root = FSDPModule::of(net);
          SideBySide<Stack> both(net, reference);
          for (int step = 0; step < 4; ++step) {
            for (int microbatch = 0; microbatch < 4; ++microbatch) {
              const bool last = microbatch == 3;
              root.set_requires_gradient_sync(last);
              root.set_reshard_after_backward(last || reshard);
              const auto x = random_batch(10 * step + microbatch, {8, 16});
              reference.gather();
              auto loss = kSquares(net, x);
              auto expected = kSquares(reference.compute, reference.input(x));
              EXPECT_EQ(loss.scalar_type(), kBf16);
              EXPECT_SAME(loss.detach(), expected.detach());
              loss.backward();
              expected.backward();
              reference.accumulate();
              const auto& grad = net->mlps[0]->in_proj->weight.grad();
              EXPECT_EQ(grad.defined() && grad.any().item<bool>(), last);
              EXPECT_EQ(recorder->dtypes.size(), n > 1 ? 3u * (step + last) : 0u);
            }
            both.step();
          }
          EXPECT_EQ(recorder->dtypes, std::vector<at::ScalarType>(n > 1 ? 12 : 0, wire));
        }
      }
    });
  }
}

// ------------------------------------------------------------ The dtype at every point

/// Writes down the dtypes of its input, its weight and the gradient of its output.
struct ProbeImpl : torch::nn::Module {
  ProbeImpl() : weight(register_parameter("weight", torch::randn({16, 16}).div(4))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    seen = {x.scalar_type(), weight.scalar_type()};
    auto y = x.to(weight.scalar_type()).matmul(weight);
    y.register_hook([this](const torch::Tensor& grad) { seen.push_back(grad.scalar_type()); });
    return y;
  }
  torch::Tensor weight;
  std::vector<at::ScalarType> seen;
};
FSDP_MODULE(Probe);

struct TableRow {
  at::ScalarType own; // of the parameter
  MixedPrecisionPolicy policy;
  at::ScalarType compute;
  at::ScalarType wire; // of gradients
};

TEST(MixedPrecision, TheDtypeAtEveryPoint) {
  const std::vector<TableRow> table{
      {kFp32, {}, kFp32, kFp32},
      {kFp32, {.param_dtype = kBf16}, kBf16, kBf16},
      {kFp32, {.param_dtype = kFp16}, kFp16, kFp16},
      {kFp32, {.param_dtype = kBf16, .reduce_dtype = kFp32}, kBf16, kFp32},
      {kFp32, {.param_dtype = kBf16, .reduce_dtype = kBf16}, kBf16, kBf16},
      {kFp32, {.param_dtype = kFp16, .reduce_dtype = kFp32}, kFp16, kFp32},
      {kFp32, {.param_dtype = kFp32, .reduce_dtype = kBf16}, kFp32, kBf16},
      {kFp32, {.reduce_dtype = kBf16}, kFp32, kBf16},
      {kFp32, {.param_dtype = kFp64}, kFp64, kFp64},
      {kBf16, {.param_dtype = kBf16, .reduce_dtype = kBf16}, kBf16, kBf16},
      {kBf16, {.reduce_dtype = kFp32}, kBf16, kFp32},
      {kBf16, {.param_dtype = kFp32}, kFp32, kFp32},
      {kFp64, {.param_dtype = kFp32}, kFp32, kFp32},
      {kFp64, {}, kFp64, kFp64},
  };
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [&](int) {
      for (size_t row = 0; row < table.size(); ++row) {
        SCOPED_TRACE("row " + std::to_string(row));
        const auto& [own, policy, compute, wire] = table[row];
        auto net = seeded<Probe>();
        auto reference = by_hand<Probe>(policy);
        net->to(own);
        reference.master->to(own);
        const auto recorder = std::make_shared<DtypeRecorder>();
        fully_shard(net, {.reshard_after_forward = true, .mp_policy = policy})
            .set_custom_reduce_scatter(recorder);
        train_by_hand(net, reference, {4, 16}, kSquares);
        const auto given = policy.param_dtype.value_or(kFp32);
        EXPECT_EQ(net->seen, (std::vector<at::ScalarType>{given, compute, compute}));
        EXPECT_EQ(recorder->dtypes, std::vector<at::ScalarType>(n > 1 ? 10 : 0, wire));
        EXPECT_EQ(net->weight.scalar_type(), own);
        EXPECT_EQ(as_dtensor(net->weight).scalar_type(), own);
        CommDebugMode comm;
        net(random_batch(0, {4, 16})).sum().backward();
        EXPECT_EQ(net->weight.grad().scalar_type(), own);
        const auto bytes = [n](at::ScalarType dtype) {
          return n == 1 ? 0 : 256 * static_cast<int64_t>(c10::elementSize(dtype));
        };
        EXPECT_EQ(comm.bytes("all_gather"), 2 * bytes(compute));
        EXPECT_EQ(comm.bytes("reduce_scatter"), bytes(wire));
        EXPECT_EQ(comm.total(), n == 1 ? 0 : 3);
      }
    });
  }
}

TEST(MixedPrecision, HalvesWhatIsGathered) {
  run_ranks(2, [](int) {
    const FullyShardOptions options{.mp_policy = {.param_dtype = kBf16, .reduce_dtype = kFp32}};
    auto net = seeded<MLP>(4); // 4*16 + 16 and 16*4 + 4 elements
    auto reference = by_hand<MLP>(options.mp_policy, 4);
    fully_shard(net->in_proj, options);
    fully_shard(net->out_proj, options);
    fully_shard(net, options);
    EXPECT_TRUE(is_fsdp_module(net->in_proj) && is_fsdp_module(net->out_proj));
    EXPECT_TRUE(is_fsdp_module(net));
    CommDebugMode comm;
    net(random_batch(0, {2, 4})).sum().backward();
    EXPECT_EQ(comm.bytes("all_gather"), 2 * 2 * (80 + 68)); // in forward and in backward
    EXPECT_EQ(comm.bytes("reduce_scatter"), 4 * (80 + 68));
    net->zero_grad();
    train_by_hand(net, reference, {2, 4}, kSquares, 3);
  });
}

TEST(MixedPrecision, InputsThatNeedGradientsGetThemInTheirDtype) {
  for (const int n : {1, 2}) {
    run_ranks(n, [](int) {
      const MixedPrecisionPolicy policy{.param_dtype = kBf16, .output_dtype = kFp32};
      auto net = seeded<Stack>(16);
      auto reference = by_hand<Stack>(policy, 16);
      shard_stack(net, {.mp_policy = policy});
      const auto x = random_batch(0, {4, 16}).set_requires_grad(true);
      const auto expected = random_batch(0, {4, 16}).set_requires_grad(true);
      reference.gather();
      auto loss = net(x).pow(2).sum();
      EXPECT_EQ(loss.scalar_type(), kFp32);
      loss.backward();
      reference.compute(reference.input(expected)).to(kFp32).pow(2).sum().backward();
      EXPECT_SAME(x.grad(), expected.grad());
      reference.accumulate();
      reference.reduce();
      expect_parity(*net, *reference.master, kExact);
    });
  }
}

// Dtypes are those of the first forward.
TEST(MixedPrecision, ModuleToAfterSharding) {
  run_ranks(2, [](int) {
    const MixedPrecisionPolicy policy{.param_dtype = kBf16, .reduce_dtype = kBf16};
    auto net = seeded<Stack>(16);
    auto reference = by_hand<Stack>(policy, 16);
    net->to(kBf16);
    reference.master->to(kBf16);
    const auto recorder = shard_stack(net, {.reshard_after_forward = true, .mp_policy = policy});
    net->to(kFp32);
    reference.master->to(kFp32);
    train_by_hand(net, reference, {4, 16}, kSquares);
    EXPECT_EQ(recorder->dtypes, std::vector<at::ScalarType>(30, kBf16));
    CommDebugMode comm;
    net(random_batch(0, {4, 16})).sum().backward();
    EXPECT_EQ(comm.bytes("all_gather"), 2 * 3 * 2 * (2 * 16 * 64 + 16 + 64));
    EXPECT_EQ(net->mlps[0]->in_proj->weight.grad().scalar_type(), kFp32);
  });
}

// ------------------------------------------------------------ Several dtypes in one group

/// Weights of three dtypes, each applied in the dtype that it shows.
struct ManyDtypesImpl : torch::nn::Module {
  ManyDtypesImpl() {
    for (const auto dtype : {kFp32, kBf16, kFp64}) {
      weights.push_back(
          register_parameter(c10::toString(dtype), torch::randn({16, 16}).div(4).to(dtype)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    seen.clear();
    for (const auto& weight : weights) {
      seen.push_back(weight.scalar_type());
      x = torch::tanh(x.to(weight.scalar_type()).matmul(weight));
    }
    return x;
  }
  std::vector<torch::Tensor> weights;
  std::vector<at::ScalarType> seen;
};
FSDP_MODULE(ManyDtypes);

TEST(MixedPrecision, SeveralOwnDtypesInOneGroup) {
  using Dtypes = std::vector<at::ScalarType>;
  struct Case {
    MixedPrecisionPolicy policy;
    Dtypes compute;
    std::set<at::ScalarType> wire;
  };
  const Dtypes own{kFp32, kBf16, kFp64};
  const std::vector<Case> cases{
      {{}, own, {kFp32, kBf16, kFp64}},
      {{.param_dtype = kBf16, .reduce_dtype = kFp32}, {kBf16, kBf16, kBf16}, {kFp32}},
      {{.param_dtype = kFp32}, {kFp32, kFp32, kFp32}, {kFp32}},
      {{.reduce_dtype = kFp32}, own, {kFp32}},
      {{.reduce_dtype = kBf16}, own, {kBf16}},
  };
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [&](int) {
      for (const auto& [policy, compute, wire] : cases) {
        for (const auto& options : layouts(policy)) {
          SCOPED_TRACE_OF(policy, options.reshard_after_forward, bool(options.shard_placement_fn));
          auto net = seeded<ManyDtypes>();
          auto reference = by_hand<ManyDtypes>(policy);
          const auto recorder = std::make_shared<DtypeRecorder>();
          fully_shard(net, options).set_custom_reduce_scatter(recorder);
          CommDebugMode comm;
          net(random_batch(0, {4, 16}));
          int64_t bytes = 0;
          for (const auto dtype : compute) {
            bytes += 256 * static_cast<int64_t>(c10::elementSize(dtype));
          }
          EXPECT_EQ(comm.bytes("all_gather"), n > 1 ? bytes : 0);
          EXPECT_EQ(net->seen, compute);
          train_by_hand(net, reference, {4, 16}, kSquares, 5);
          const std::set<at::ScalarType> reduced(recorder->dtypes.begin(), recorder->dtypes.end());
          EXPECT_EQ(reduced, n > 1 ? wire : std::set<at::ScalarType>());
        }
      }
    });
  }
}

// ------------------------------------------------------------ Refused

TEST(MixedPrecision, DtypesThatAreNotFloatingPointAreRefused) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<MLP>(4);
    for (const auto dtype : {torch::kInt, torch::kLong, torch::kBool, torch::kComplexFloat}) {
      for (const auto& [policy, field] : std::vector<std::pair<MixedPrecisionPolicy, std::string>>{
               {{.param_dtype = dtype}, "param_dtype"},
               {{.param_dtype = kBf16, .reduce_dtype = dtype}, "reduce_dtype"},
               {{.output_dtype = dtype}, "output_dtype"}}) {
        SCOPED_TRACE_OF(dtype, field);
        const FullyShardOptions options{.mp_policy = policy};
        const auto refused = [&, field = field](const std::string& type, auto call) {
          const auto message = message_of<c10::ValueError>(call);
          for (const std::string& part : {type, field, std::string(c10::toString(dtype))}) {
            EXPECT_TRUE(contains(message, part));
          }
        };
        refused("MLPImpl", [&] { fully_shard(net, options); });
        refused("LinearImpl", [&] { fully_shard({net->in_proj, net->out_proj}, options); });
        EXPECT_FALSE(is_fsdp_module(net) || is_fsdp_module(net->in_proj));
      }
    }
    const auto whole = reference->named_parameters();
    for (const auto& item : net->named_parameters()) {
      EXPECT_SAME(item.value().detach(), whole[item.key()].detach()); // nothing has changed
    }
    fully_shard(net, {.mp_policy = {.param_dtype = kBf16}});
    EXPECT_EQ(net(torch::ones({1, 4})).scalar_type(), kBf16);
  });
}

// What is gathered has fewer digits than the shards.
TEST(MixedPrecision, ModuleToWhileParametersAreWholeKeepsTheShards) {
  for (const int n : {1, 2}) {
    run_ranks(n, [](int) {
      for (const auto dtype : {torch::kFloat, torch::kDouble}) {
        auto net = seeded<MLP>(4);
        const auto whole = seeded<MLP>(4);
        auto root = fully_shard(net, {.mp_policy = {.param_dtype = torch::kBFloat16}});
        for (const bool by_forward : {true, false}) {
          SCOPED_TRACE_OF(dtype, by_forward);
          by_forward ? (void)net(torch::ones({2, 4})) : (void)root.unshard();
          net->to(dtype);
          root.reshard();
          for (const auto& item : net->named_parameters()) {
            const auto expected = whole->named_parameters()[item.key()].detach().to(dtype);
            EXPECT_SAME(as_dtensor(item.value()).to_local(), part_of(expected, item.value()));
          }
        }
      }
    });
  }
}

TEST(MixedPrecision, SumsInEightBitsAreRefused) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(4);
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>(
            [&] { fully_shard(net, {.mp_policy = {.reduce_dtype = torch::kFloat8_e4m3fn}}); }),
        "sums cannot be computed"));
    EXPECT_FALSE(is_fsdp_module(net));
  });
}

} // namespace
} // namespace fsdp
