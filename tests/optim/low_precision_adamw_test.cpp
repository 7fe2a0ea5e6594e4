// AdamW for parameters in bf16, with moments in 16 or 8 bits.
#include <fsdp/low_precision_adamw.h>
#include <fsdp/optim.h>
#include <fsdp/state_dict.h>

#include <sstream>

#include "param/param_placement.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;
using optim::LowPrecisionAdamW;
using optim::LowPrecisionAdamWOptions;
using Tensors = std::vector<torch::Tensor>;

constexpr auto kEightBits = at::kFloat8_e4m3fn;

/// Parameters of several sizes. One has more elements than are updated at once.
struct ShapesImpl : torch::nn::Module {
  ShapesImpl() {
    for (const auto& sizes :
         std::vector<std::vector<int64_t>>{{7, 5}, {4, 6}, {3}, {300, 3}, {2, 3, 4}, {210, 200}}) {
      params.push_back(
          register_parameter("p" + std::to_string(params.size()), torch::randn(sizes)));
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return params[0].sum() * x;
  }
  Tensors params;
};
FSDP_MODULE(Shapes);

Shapes low_precision(Shapes net) {
  net->to(at::kBFloat16);
  return net;
}

/// The same gradients on any number of ranks.
void set_gradients(Shapes& net, int step) {
  for (size_t i = 0; i < net->params.size(); ++i) {
    auto& param = net->params[i];
    const bool is_sharded = detail::placement_of(param).has_value();
    const auto sizes = is_sharded ? as_dtensor(param).sizes() : param.sizes().vec();
    auto grad = torch::randn(sizes, generator(100 * step + static_cast<int>(i)))
                    .to(at::TensorOptions(test_device()).dtype(param.scalar_type()));
    param.mutable_grad() = is_sharded ? part_of(grad, param) : grad;
  }
}

// ------------------------------------------------------------ The optimizer

TEST(LowPrecisionAdamW, InFp32EqualsAdamW) {
  auto [net, reference] = twins<Shapes>();
  LowPrecisionAdamW optimizer(
      net->params, LowPrecisionAdamWOptions(0.01).moments(at::kFloat).weight_decay(0.1));
  optim::AdamW expected(reference->params, torch::optim::AdamWOptions(0.01).weight_decay(0.1));
  for (int step = 0; step < 3; ++step) {
    set_gradients(net, step);
    set_gradients(reference, step);
    optimizer.step();
    expected.step();
    expect_parity(*net, *reference, 0);
  }
}

/// How far 1000 updates by about 1e-4 take parameters that begin at 1.
double distance(const LowPrecisionAdamWOptions& options) {
  auto param = torch::ones({512}, at::TensorOptions(test_device()).dtype(at::kBFloat16));
  param.set_requires_grad(true);
  LowPrecisionAdamW optimizer(Tensors{param}, options);
  for (int step = 0; step < 1000; ++step) {
    param.mutable_grad() = torch::full_like(param, 0.5);
    optimizer.step();
  }
  return 1 - param.detach().to(at::kDouble).mean().item<double>();
}

TEST(LowPrecisionAdamW, SmallUpdatesCountOnAverage) {
  for (const auto moments : {at::kFloat, at::kBFloat16, kEightBits}) {
    SCOPED_TRACE(moments);
    const auto options = LowPrecisionAdamWOptions(1e-4).weight_decay(0).moments(moments);
    EXPECT_NEAR(distance(options), 0.1, 0.004);
    auto nearest = options;
    EXPECT_EQ(distance(nearest.stochastic_rounding(false)), 0);
  }
}

TEST(LowPrecisionAdamW, OtherSeedsRoundInOtherWays) {
  const auto after = [](int64_t seed) {
    auto net = low_precision(seeded<Shapes>());
    LowPrecisionAdamW optimizer(net->params, LowPrecisionAdamWOptions(0.001).seed(seed));
    set_gradients(net, 0);
    optimizer.step();
    return net->params[0].detach().clone();
  };
  EXPECT_SAME(after(1), after(1));
  EXPECT_FALSE(after(1).equal(after(2)));
}

/// Makes the same steps with `net` and with a whole model, which stay equal to the bit.
void expect_same_rounding(Shapes& net, LowPrecisionAdamWOptions options) {
  auto reference = low_precision(seeded<Shapes>());
  LowPrecisionAdamW optimizer(net->params, options);
  LowPrecisionAdamW expected(reference->params, options);
  for (int step = 0; step < 3; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    set_gradients(net, step);
    set_gradients(reference, step);
    optimizer.step();
    expected.step();
    for (size_t i = 0; i < net->params.size(); ++i) {
      EXPECT_SAME(as_dtensor(net->params[i]).full_tensor().detach(), reference->params[i].detach());
    }
  }
}

TEST(LowPrecisionAdamW, AnyNumberOfRanksRoundsAlike) {
  for (const auto moments : {at::kFloat, at::kBFloat16}) {
    for (const int n : {1, 2, 3, 4, 7}) {
      for (const int64_t dim : {0, 1}) {
        run_ranks(n, [&](int) {
          SCOPED_TRACE_OF(n, dim);
          auto net = low_precision(seeded<Shapes>());
          fully_shard(net, {.shard_placement_fn = [&](const auto&, const torch::Tensor& param) {
                        return std::optional<ShardPlacement>(Shard{param.dim() > 1 ? dim : 0});
                      }});
          expect_same_rounding(net, LowPrecisionAdamWOptions(0.01).moments(moments));
        });
      }
    }
  }
}

TEST(LowPrecisionAdamW, ReplicasStayEqual) {
  for (const auto moments : {at::kBFloat16, kEightBits}) {
    run_ranks(4, [&](int) {
      const auto mesh = init_device_mesh(test_device(), {2, 2}, {"replicate", "shard"});
      auto net = low_precision(seeded<Shapes>());
      fully_shard(net, {.mesh = mesh});
      LowPrecisionAdamW optimizer(net->params, LowPrecisionAdamWOptions(0.01).moments(moments));
      for (int step = 0; step < 3; ++step) {
        set_gradients(net, step);
        optimizer.step();
      }
      for (const auto& param : net->params) {
        const auto mine = as_dtensor(param).to_local().detach().contiguous();
        const auto first = mine.clone();
        mesh["replicate"].get_group().broadcast(first, 0);
        EXPECT_SAME(mine, first);
      }
    });
  }
}

TEST(LowPrecisionAdamW, TrainsASharedModel) {
  run_ranks(3, [](int) {
    auto net = seeded<Stack>(8);
    net->to(at::kBFloat16);
    fully_shard(net);
    LowPrecisionAdamW optimizer(
        net->parameters(), LowPrecisionAdamWOptions(0.01).moments(kEightBits));
    double first = 0;
    double last = 0;
    for (int step = 0; step < 40; ++step) {
      const auto loss = net(random_batch(0, {16, 8}).to(at::kBFloat16)).pow(2).mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      last = loss.item<double>();
      first = step == 0 ? last : first;
    }
    EXPECT_LT(last, first / 2);
  });
}

// ------------------------------------------------------------ What is kept

/// Trains for two steps on `before` ranks, and on from there on `after` ranks and without a break.
/// Compares all parameters.
void expect_resume(at::ScalarType moments, int before, int after) {
  SCOPED_TRACE_OF(moments, before, after);
  const StateDictOptions full{.full_state_dict = true};
  const StateDictOptions from_0{.broadcast_from_rank0 = true};
  const auto options = LowPrecisionAdamWOptions(0.01).moments(moments);
  StateDict kept, weights, expected;
  const auto train = [](Shapes& net, LowPrecisionAdamW& optimizer, int first) {
    for (int step = first; step < first + 2; ++step) {
      set_gradients(net, step);
      optimizer.step();
    }
  };
  run_ranks(before, [&](int rank) {
    auto net = low_precision(seeded<Shapes>());
    fully_shard(net);
    LowPrecisionAdamW optimizer(net->params, options);
    train(net, optimizer, 0);
    const auto state = get_optimizer_state_dict(net, optimizer, full);
    const auto model = get_model_state_dict(net, full);
    train(net, optimizer, 2);
    const auto last = get_model_state_dict(net, full);
    if (rank == 0) {
      kept = state;
      weights = model;
      expected = last;
    }
  });
  const auto dtype = std::get<at::Tensor>(kept.at("state.p0.exp_avg")).scalar_type();
  EXPECT_EQ(dtype, moments == kEightBits ? at::kBFloat16 : moments);
  run_ranks(after, [&](int rank) {
    SCOPED_TRACE_OF(moments, before, after);
    auto net = low_precision(seeded<Shapes>());
    fully_shard(net);
    LowPrecisionAdamW optimizer(net->params, options);
    set_model_state_dict(net, rank == 0 ? weights : StateDict(), from_0);
    set_optimizer_state_dict(net, optimizer, rank == 0 ? kept : StateDict(), from_0);
    train(net, optimizer, 2);
    const auto last = get_model_state_dict(net, full);
    if (rank == 0) {
      for (const auto& [name, value] : expected) {
        const auto& now = std::get<at::Tensor>(last.at(name));
        if (moments == kEightBits && before != after) { // other blocks
          EXPECT_TRUE(near(now.to(at::kFloat), std::get<at::Tensor>(value).to(at::kFloat), 0.05));
        } else {
          EXPECT_SAME(now, std::get<at::Tensor>(value));
        }
      }
    }
  });
}

TEST(LowPrecisionAdamW, ResumesOnAnyNumberOfRanks) {
  for (const auto moments : {at::kFloat, at::kBFloat16, kEightBits}) {
    expect_resume(moments, 2, 2);
    expect_resume(moments, 2, 3);
    expect_resume(moments, 3, 1);
  }
}

TEST(LowPrecisionAdamW, TakesOverWhatAdamWKept) {
  run_ranks(2, [](int) {
    auto net = seeded<Shapes>();
    fully_shard(net);
    optim::AdamW adamw(net->params, torch::optim::AdamWOptions(0.01));
    set_gradients(net, 0);
    adamw.step();
    for (const auto moments : {at::kFloat, kEightBits}) {
      LowPrecisionAdamW optimizer(net->params, LowPrecisionAdamWOptions(0.01).moments(moments));
      const auto state = get_optimizer_state_dict(net, adamw);
      set_optimizer_state_dict(net, optimizer, state, {.strict = false});
      const auto now = get_optimizer_state_dict(net, optimizer);
      for (const std::string key : {"state.p0.exp_avg", "state.p3.exp_avg_sq"}) {
        const auto mine = std::get<DTensor>(now.at(key)).to_local();
        const auto theirs = std::get<DTensor>(state.at(key)).to_local();
        EXPECT_TRUE(
            at::allclose(mine.to(at::kFloat), theirs, moments == at::kFloat ? 0 : 0.14, 1e-7))
            << key;
      }
    }
  });
}

TEST(LowPrecisionAdamW, GivesAdamWWhatItKept) {
  run_ranks(2, [](int) {
    auto net = seeded<Shapes>();
    fully_shard(net);
    LowPrecisionAdamW optimizer(net->params, LowPrecisionAdamWOptions(0.01).moments(kEightBits));
    set_gradients(net, 0);
    optimizer.step();
    optim::AdamW adamw(net->params, torch::optim::AdamWOptions(0.01));
    const auto state = get_optimizer_state_dict(net, optimizer);
    set_optimizer_state_dict(net, adamw, state, {.strict = false});
    const auto now = get_optimizer_state_dict(net, adamw);
    for (const std::string key : {"state.p0.exp_avg", "state.p3.exp_avg_sq"}) {
      const auto mine = std::get<DTensor>(now.at(key)).to_local();
      EXPECT_EQ(mine.scalar_type(), at::kFloat);
      EXPECT_SAME(mine, std::get<DTensor>(state.at(key)).to_local().to(at::kFloat));
    }
  });
}

TEST(LowPrecisionAdamW, ArchivesHoldItsStateAndOptions) {
  for (const auto moments : {at::kFloat, at::kBFloat16, kEightBits}) {
    SCOPED_TRACE(moments);
    auto net = low_precision(seeded<Shapes>());
    LowPrecisionAdamW optimizer(
        net->params, LowPrecisionAdamWOptions(0.01).moments(moments).seed(5));
    set_gradients(net, 0);
    optimizer.step();
    std::stringstream stream;
    torch::save(optimizer, stream);
    auto copy = low_precision(seeded<Shapes>());
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < net->params.size(); ++i) {
        copy->params[i].copy_(net->params[i]);
      }
    }
    LowPrecisionAdamW loaded(copy->params);
    torch::load(loaded, stream);
    set_gradients(net, 1);
    set_gradients(copy, 1);
    optimizer.step();
    loaded.step();
    expect_parity(*copy, *net, 0);
  }
}

TEST(LowPrecisionAdamW, RefusesWhatItCannotDo) {
  const auto param = [](at::ScalarType dtype) {
    auto made = torch::ones({3}, dtype).set_requires_grad(true);
    made.mutable_grad() = torch::ones_like(made);
    return Tensors{made};
  };
  const auto message = [&](const Tensors& params, const LowPrecisionAdamWOptions& options) {
    return message_of<c10::ValueError>([&] { LowPrecisionAdamW(params, options).step(); });
  };
  EXPECT_TRUE(contains(
      message(param(at::kHalf), {}),
      "[LowPrecisionAdamW] parameter 0 of group 0 is of dtype Half, not BFloat16 or Float"));
  const auto good = param(at::kBFloat16);
  EXPECT_TRUE(contains(
      message(good, LowPrecisionAdamWOptions().moments(at::kHalf)),
      "moments is Half, not Float, BFloat16 or Float8_e4m3fn"));
  EXPECT_TRUE(contains(message(good, LowPrecisionAdamWOptions(-1)), "lr is -1, not 0 or more"));
  EXPECT_TRUE(contains(
      message(good, LowPrecisionAdamWOptions().betas({0.9, 1})), "a beta is 1, not from 0"));
  LowPrecisionAdamW optimizer(good);
  optimizer.step();
  const auto before = good[0].detach().clone();
  static_cast<LowPrecisionAdamWOptions&>(optimizer.param_groups()[0].options()).moments(at::kFloat);
  EXPECT_TRUE(contains(
      message_of<c10::ValueError>([&] { optimizer.step(); }),
      "exp_avg of parameter 0 of group 0 is in BFloat16, but the option moments is Float"));
  EXPECT_SAME(good[0].detach(), before);
}

} // namespace
} // namespace fsdp
