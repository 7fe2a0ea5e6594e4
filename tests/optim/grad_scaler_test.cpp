// GradScaler: scales, what every rank finds out together, and the order of calls.
#include <fsdp/clip_grad_norm.h>
#include <fsdp/debug.h>
#include <fsdp/grad_scaler.h>
#include <fsdp/optim.h>

#include <cmath>
#include <limits>

#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;
using Tensors = std::vector<torch::Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

torch::Tensor param_with_grad(double grad, torch::TensorOptions options = {}) {
  const auto param = torch::ones({3}, options).set_requires_grad(true);
  param.mutable_grad() = torch::full({3}, grad, options);
  return param;
}

/// One iteration of an optimizer of one parameter with this gradient, before
/// unscaling; returns whether it stepped.
bool iterate(GradScaler& scaler, double grad) {
  scaler.scale(torch::ones({}));
  torch::optim::SGD optimizer(Tensors{param_with_grad(grad)}, 1);
  const bool stepped = scaler.step(optimizer);
  scaler.update();
  return stepped;
}

// ------------------------------------------------------------ One flag for all ranks

struct PairImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return second(first(x));
  }
  Linear first = register_module("first", linear(4, 4, false));
  Linear second = register_module("second", linear(4, 4, false));
};
FSDP_MODULE(Pair);

Pair sharded_pair() {
  auto net = seeded<Pair>();
  fully_shard(net->first);
  fully_shard(net->second);
  fully_shard(net);
  return net;
}

TEST(GradScaler, OneRanksInfinityIsFoundByAll) {
  for (const int n : {1, 2, 3, 4}) {
    run_ranks(n, [n](int rank) {
      for (const double bad : {0.0, kInfinity, -kInfinity, kNaN}) {
        SCOPED_TRACE_OF(bad);
        const bool has_inf = bad != 0;
        auto net = sharded_pair();
        optim::AdamW optimizer(net->parameters(), 1e-2);
        GradScaler scaler({.init_scale = 2});
        scaler.scale(net(random_batch(0, {4, 4})).sum()).backward();
        const auto& weight = net->first->weight;
        if (has_inf && rank == std::min(1, n - 1)) {
          weight.mutable_grad()[0][0] = bad;
        }
        const auto grad = weight.grad().clone();
        const auto values = weight.detach().clone();

        CommDebugMode comm;
        scaler.unscale_(optimizer);
        EXPECT_EQ(comm.count("all_reduce"), n == 1 ? 0 : 1);
        EXPECT_SAME(weight.grad(), grad / 2);
        EXPECT_EQ(scaler.step(optimizer), !has_inf);
        EXPECT_EQ(comm.total(), n == 1 ? 0 : 1); // the step asks nobody again
        EXPECT_SAME(weight.grad(), grad / 2);    // nor does it unscale again
        EXPECT_EQ(optimizer.state().empty(), has_inf);
        if (weight.numel() > 0) {
          EXPECT_EQ(weight.detach().equal(values), has_inf);
        }
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), has_inf ? 1 : 2);
      }
    });
  }
}

TEST(GradScaler, ARankWithoutGradientsIsToldToo) {
  run_ranks(2, [](int rank) {
    auto net = sharded_pair();
    torch::optim::SGD optimizer(net->parameters(), 1e-2);
    GradScaler scaler;
    scaler.scale(net(random_batch(0, {4, 4})).sum()).backward();
    if (rank == 0) {
      net->second->weight.mutable_grad()[0][0] = kInfinity;
    } else {
      net->zero_grad();
    }
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 32768);
  });
}

TEST(GradScaler, OneReductionForEachMesh) {
  run_ranks(4, [](int rank) {
    auto net = seeded<MLP>(6);
    const auto pairs = init_device_mesh(test_device(), {2, 2}, {"a", "b"})["b"];
    fully_shard(
        net, {.shard_placement_fn = [&](const std::string& name,
                                        const torch::Tensor&) -> std::optional<ShardPlacement> {
          return name == "in_proj.weight" ? std::optional(ShardPlacement{0, pairs}) : std::nullopt;
        }});
    torch::optim::SGD optimizer(net->parameters(), 1e-2);
    GradScaler scaler;
    scaler.scale(net(random_batch(0, {4, 6})).sum()).backward();
    if (rank == 3) {
      net->in_proj->weight.mutable_grad()[0][0] = kNaN;
    }
    CommDebugMode comm;
    EXPECT_FALSE(scaler.step(optimizer)); // not on the other pair either
    ASSERT_EQ(comm.count("all_reduce"), 2);
    EXPECT_EQ(comm.total(), 2);
    EXPECT_NE(comm.calls()[0].group, comm.calls()[1].group);
  });
}

// ------------------------------------------------------------ Training

torch::Tensor loss_of(Stack& net, int step, double factor) {
  return (net(random_batch(step, {4, 8})).to(torch::kFloat) - 1).pow(2).mean() * factor;
}

Stack sharded_half_stack() {
  auto net = seeded<Stack>(8, 2);
  const FullyShardOptions options{.mp_policy = {.param_dtype = torch::kHalf}};
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, options);
  }
  fully_shard(net, options);
  return net;
}

// Gradients so small that fp16 has not one digit of them.
TEST(GradScaler, HalfPrecisionTrainsLikeFullPrecision) {
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [](int) {
      for (const bool enabled : {true, false}) {
        SCOPED_TRACE_OF(enabled);
        auto net = sharded_half_stack();
        auto reference = seeded<Stack>(8, 2);
        const auto initial = seeded<Stack>(8, 2);
        optim::SGD optimizer(net->parameters(), 1e5);
        torch::optim::SGD expected(reference->parameters(), 1e5);
        GradScaler scaler({.enabled = enabled});
        for (int step = 0; step < 6; ++step) {
          scaler.scale(loss_of(net, step, 1e-6)).backward();
          loss_of(reference, step, 1e-6).backward();
          average_gradients(*reference);
          EXPECT_TRUE(scaler.step(optimizer));
          scaler.update();
          expected.step();
          optimizer.zero_grad();
          expected.zero_grad();
        }
        const auto whole = reference->named_parameters();
        const auto before = initial->named_parameters();
        bool equal = true;
        for (const auto& item : net->named_parameters()) {
          const auto part = part_of(whole[item.key()].detach(), item.value());
          equal = equal && near(item.value().detach(), part, 1e-3);
        }
        const auto moved = whole["1.out_proj.bias"] - before["1.out_proj.bias"];
        EXPECT_GT(moved.abs().max().item<double>(), 5e-2);
        // Without scaling the gradients are lost, though maybe not on every rank.
        auto all_equal = torch::full({1}, equal ? 1 : 0, test_device());
        default_group().all_reduce(all_equal, ReduceOp::Min);
        EXPECT_EQ(all_equal.item<int>() == 1, enabled);
      }
    });
  }
}

TEST(GradScaler, BacksOffUntilHalfPrecisionIsFinite) {
  run_ranks(2, [](int) {
    auto net = sharded_half_stack();
    optim::SGD optimizer(net->parameters(), 1e-2);
    GradScaler scaler({.init_scale = std::exp2(30)});
    const auto initial = net->mlps[0]->in_proj->weight.detach().clone();
    int skipped = 0;
    for (int step = 0; step < 25; ++step) {
      scaler.scale(loss_of(net, step, 1)).backward();
      const bool stepped = scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
      skipped += stepped ? 0 : 1;
      EXPECT_EQ(scaler.get_scale(), std::exp2(30 - skipped));
      if (skipped == step + 1) {
        EXPECT_SAME(net->mlps[0]->in_proj->weight.detach(), initial);
      }
    }
    EXPECT_GT(skipped, 5);
    EXPECT_LT(skipped, 25);
    EXPECT_FALSE(net->mlps[0]->in_proj->weight.detach().equal(initial));
    for (const auto& param : net->parameters()) {
      EXPECT_TRUE(param.isfinite().all().item<bool>());
    }
    auto most = torch::full({1}, skipped);
    default_group().all_reduce(most, ReduceOp::Max);
    EXPECT_EQ(most.item<int>(), skipped);
  });
}

TEST(GradScaler, ClipsWhatIsUnscaled) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Stack>(8, 2);
    for (auto& mlp : net->mlps) {
      fully_shard(mlp);
    }
    fully_shard(net);
    torch::optim::SGD optimizer(net->parameters(), 1);
    torch::optim::SGD expected(reference->parameters(), 1);
    GradScaler scaler;
    for (int step = 0; step < 5; ++step) {
      scaler.scale(loss_of(net, step, 1)).backward();
      loss_of(reference, step, 1).backward();
      average_gradients(*reference);
      scaler.unscale_(optimizer);
      const auto total = clip_grad_norm_(net->parameters(), 0.1).item<double>();
      EXPECT_GT(total, 0.1);
      EXPECT_NEAR(
          total, torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.1), 1e-4 * total);
      expect_parity(*net, *reference);
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
      expected.step();
      expect_parity(*net, *reference);
      optimizer.zero_grad();
      expected.zero_grad();
    }
  });
}

// ------------------------------------------------------------ The scale

TEST(GradScaler, GrowsAfterAnIntervalAndBacksOffAtOnce) {
  GradScaler scaler(
      {.init_scale = 4, .growth_factor = 3, .backoff_factor = 0.25, .growth_interval = 3});
  EXPECT_EQ(scaler.get_scale(), 4);
  const auto scale_after = [&](double grad) {
    EXPECT_EQ(iterate(scaler, grad), std::isfinite(grad));
    return scaler.get_scale();
  };
  EXPECT_EQ(scale_after(1), 4);
  EXPECT_EQ(scale_after(1), 4);
  EXPECT_EQ(scaler.state().growth_tracker, 2);
  EXPECT_EQ(scale_after(1), 12);
  EXPECT_EQ(scaler.state().growth_tracker, 0);
  EXPECT_EQ(scale_after(1), 12);
  EXPECT_EQ(scale_after(1), 12);
  EXPECT_EQ(scale_after(kNaN), 3); // and counts from there again
  EXPECT_EQ(scale_after(1), 3);
  EXPECT_EQ(scale_after(1), 3);
  EXPECT_EQ(scale_after(1), 9);
}

TEST(GradScaler, ScalesTheLossAndWithItTheGradients) {
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    SCOPED_TRACE_OF(dtype);
    GradScaler scaler({.init_scale = 8});
    const auto x = torch::full({}, 3, dtype).set_requires_grad(true);
    const auto scaled = scaler.scale(x * 2);
    EXPECT_EQ(scaled.item<double>(), 48);
    scaled.backward();
    EXPECT_EQ(x.grad().item<double>(), 16);
  }
  // Where the gradients are elsewhere than the loss: offloaded ones.
  const auto device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  GradScaler scaler({.init_scale = 8});
  EXPECT_EQ(scaler.scale(torch::ones({}, device)).device().type(), device);
  const auto param = param_with_grad(4);
  torch::optim::SGD optimizer(Tensors{param}, 1);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_SAME(param.detach(), torch::full({3}, 0.5));
  scaler.update();
  param.mutable_grad().fill_(kInfinity);
  EXPECT_FALSE(scaler.step(optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 4);
  scaler.update(100.0); // needs no step
  EXPECT_EQ(scaler.get_scale(), 100);
  EXPECT_EQ(scaler.scale(torch::ones({}, device)).item<double>(), 100);
}

TEST(GradScaler, StateIsTakenUpWhereItWas) {
  const GradScalerOptions options{.init_scale = 4, .growth_interval = 3};
  GradScaler first(options);
  iterate(first, kInfinity);
  iterate(first, 1);
  iterate(first, 1);
  const auto state = first.state();
  EXPECT_EQ(state.scale, 2);
  EXPECT_EQ(state.growth_tracker, 2);
  for (const bool used : {false, true}) {
    SCOPED_TRACE_OF(used);
    GradScaler second(options);
    if (used) {
      iterate(second, 1);
    }
    second.load_state(state);
    EXPECT_EQ(second.get_scale(), 2);
    EXPECT_EQ(second.state().growth_tracker, 2);
    iterate(second, 1);
    EXPECT_EQ(second.get_scale(), 4);
  }
  const auto disabled = GradScaler({.enabled = false}).state();
  EXPECT_TRUE(contains(
      message_of<c10::ValueError>([&] { first.load_state(disabled); }),
      "[GradScaler::load_state] the scale must be positive"));
  EXPECT_THROW(first.load_state({.scale = 1, .growth_tracker = -1}), c10::ValueError);
}

TEST(GradScaler, DisabledItPassesThrough) {
  GradScaler scaler({.init_scale = -1, .enabled = false}); // not looked at
  EXPECT_FALSE(scaler.is_enabled());
  EXPECT_TRUE(GradScaler().is_enabled());
  const auto loss = torch::ones({});
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  const auto param = param_with_grad(kInfinity);
  torch::optim::SGD optimizer(Tensors{param}, 1);
  scaler.unscale_(optimizer);
  scaler.unscale_(optimizer);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_TRUE(param.detach().isinf().all().item<bool>());
  scaler.update();
  scaler.update(7.0);
  scaler.load_state({.scale = 7});
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_EQ(scaler.state().scale, 0);
}

// ------------------------------------------------------------ The order of calls

TEST(GradScaler, EachOptimizerIsOnItsOwn) {
  const auto good = param_with_grad(4);
  const auto bad = param_with_grad(kInfinity);
  torch::optim::SGD first(Tensors{bad}, 1);
  torch::optim::SGD second(Tensors{good}, 1);
  GradScaler scaler({.init_scale = 8});
  scaler.scale(torch::ones({}));
  scaler.unscale_(first);
  EXPECT_FALSE(scaler.step(first));
  EXPECT_TRUE(scaler.step(second));
  EXPECT_SAME(good.detach(), torch::full({3}, 0.5));
  EXPECT_SAME(bad.detach(), torch::ones({3}));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 4);
}

TEST(GradScaler, RefusesCallsOutOfOrder) {
  GradScaler scaler;
  torch::optim::SGD optimizer(Tensors{param_with_grad(1)}, 1);
  const auto refusal = [&](auto call) { return message_of<c10::Error>(call); };
  const auto no_scale = "there is no scale yet: call scale(loss)";
  EXPECT_TRUE(contains(refusal([&] { scaler.unscale_(optimizer); }), no_scale));
  EXPECT_TRUE(contains(refusal([&] { scaler.step(optimizer); }), no_scale));
  EXPECT_TRUE(contains(refusal([&] { scaler.update(); }), no_scale));
  EXPECT_TRUE(contains(refusal([&] { scaler.scale({}); }), "undefined tensor"));

  for (int iteration = 0; iteration < 2; ++iteration) {
    scaler.scale(torch::ones({}));
    EXPECT_TRUE(contains(refusal([&] { scaler.update(); }), "No inf checks were recorded"));
    scaler.unscale_(optimizer);
    EXPECT_TRUE(contains(
        refusal([&] { scaler.unscale_(optimizer); }),
        "unscale_() has already been called on this optimizer since the last update()"));
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_TRUE(
        contains(refusal([&] { scaler.step(optimizer); }), "step() has already been called"));
    EXPECT_TRUE(contains(
        refusal([&] { scaler.unscale_(optimizer); }), "unscale_() is being called after step()"));
    scaler.update();
  }
  EXPECT_THROW(scaler.update(0.0), c10::ValueError);
  EXPECT_THROW(scaler.update(kNaN), c10::ValueError);
  EXPECT_EQ(scaler.get_scale(), 65536);
}

TEST(GradScaler, RefusesOptionsThatMakeNoSense) {
  for (const GradScalerOptions& options : std::vector<GradScalerOptions>{
           {.init_scale = 0},
           {.init_scale = 1e39}, // more than the largest float
           {.growth_factor = 1},
           {.backoff_factor = 1},
           {.backoff_factor = 0},
           {.growth_interval = 0}}) {
    SCOPED_TRACE_OF(
        options.init_scale, options.growth_factor, options.backoff_factor, options.growth_interval);
    EXPECT_THROW(GradScaler{options}, c10::ValueError);
  }
}

TEST(GradScaler, RefusesHalfAndSparseGradientsBeforeAnythingChanges) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(6);
    net->to(torch::kHalf);
    fully_shard(net);
    const auto plain = param_with_grad(4);
    auto params = net->parameters();
    params.insert(params.begin(), plain);
    torch::optim::SGD optimizer(params, 1);
    GradScaler scaler({.init_scale = 8});
    scaler.scale(torch::ones({}));
    CommDebugMode comm;
    for (int attempt = 0; attempt < 2; ++attempt) {
      net->out_proj->bias.mutable_grad() = torch::zeros_like(net->out_proj->bias);
      const auto half = message_of<c10::ValueError>([&] { scaler.unscale_(optimizer); });
      EXPECT_TRUE(contains(half, "Attempting to unscale FP16 gradients: that of 'out_proj.bias'"));
      EXPECT_TRUE(contains(half, "param_dtype"));
      EXPECT_SAME(plain.grad(), torch::full({3}, 4.0));
      net->zero_grad();
    }
    plain.mutable_grad() = torch::full({3}, 4.0).to_sparse();
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { scaler.unscale_(optimizer); }),
        "parameter 0 of group 0 has a gradient of layout Sparse"));
    EXPECT_EQ(comm.total(), 0);
    plain.mutable_grad() = torch::full({3}, 4.0);
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_SAME(plain.detach(), torch::full({3}, 0.5));
  });
}

TEST(GradScaler, ATensorListedTwiceIsUnscaledOnce) {
  const auto tied = param_with_grad(4);
  torch::optim::SGD optimizer(Tensors{tied, tied}, 1);
  GradScaler scaler({.init_scale = 8});
  scaler.scale(torch::ones({}));
  scaler.unscale_(optimizer);
  EXPECT_SAME(tied.grad(), torch::full({3}, 0.5));
}

} // namespace
} // namespace fsdp
