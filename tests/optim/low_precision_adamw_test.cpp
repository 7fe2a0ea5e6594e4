// AdamW for parameters in bf16, and moments in 16 or 8 bits.
#include <fsdp/low_precision_adamw.h>
#include <fsdp/optim.h>
#include <fsdp/state_dict.h>
#include <fsdp/tensor_parallel.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "optim/moment.h"
#include "optim/rounding.h"
#include "param/param_placement.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;
using optim::LowPrecisionAdamW;
using optim::LowPrecisionAdamWOptions;
using Tensors = std::vector<torch::Tensor>;

constexpr auto kEightBits = at::kFloat8_e4m3fn;

at::TensorOptions ints() {
  return at::TensorOptions(test_device()).dtype(at::kInt);
}

/// One parameter.
struct HolderImpl : torch::nn::Module {
  explicit HolderImpl(const std::vector<int64_t>& sizes)
      : weight(register_parameter("weight", torch::randn(sizes))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return weight.sum() * x;
  }
  torch::Tensor weight;
};
FSDP_MODULE(Holder);

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

void expect_numbers(const torch::Tensor& param) {
  const auto sizes = as_dtensor(param).sizes();
  const auto whole = at::arange(c10::multiply_integers(sizes), ints()).view(sizes);
  const detail::ElementNumbers numbers(param, detail::placement_of(param));
  EXPECT_SAME(numbers.slice(0, param.numel()), part_of(whole, param).flatten());
}

// ------------------------------------------------------------ Rounding

TEST(Rounding, IsRightOnAverage) {
  constexpr int64_t kCount = 1 << 16;
  for (const int mantissa_bits : {7, 3}) {
    const auto step = std::pow(2.0, -mantissa_bits);
    for (const double part : {0.0, 0.01, 0.3, 0.5, 0.97}) {
      for (const double sign : {1.0, -1.0}) {
        SCOPED_TRACE(c10::str(mantissa_bits, " bits, ", sign * part, " of the way"));
        const auto value = sign * (1.5 + part * step);
        const auto values = torch::full({kCount}, value, test_device());
        const auto bits = detail::random_bits(at::arange(kCount, ints()), 17);
        for (const auto& each : bits) {
          const auto rounded = values.clone();
          detail::round_stochastically_(rounded, each, mantissa_bits);
          EXPECT_TRUE(
              ((rounded == sign * 1.5) | (rounded == sign * (1.5 + step))).all().item<bool>());
          const auto ups = (rounded != sign * 1.5).to(at::kDouble).mean().item<double>();
          EXPECT_NEAR(ups, part, 5 * std::sqrt(0.25 / kCount));
        }
      }
    }
  }
}

TEST(Rounding, KeepsWhatNeedsNone) {
  const auto infinity = std::numeric_limits<float>::infinity();
  const auto values =
      torch::tensor({0.0F, -0.0F, 1.0F, -3.5F, infinity, -infinity, 1e-40F}).to(test_device());
  const auto expected = values.to(at::kBFloat16).to(at::kFloat);
  detail::round_stochastically_(expected, torch::full({7}, 0xffff, ints()), 7);
  EXPECT_SAME(expected, values.to(at::kBFloat16).to(at::kFloat));
  for (const int64_t bits : {0x7fc00000, 0x7fffffff, -1}) { // the second one is a GPU's
    const auto nan = torch::full({1}, bits, ints()).view(at::kFloat);
    detail::round_stochastically_(nan, torch::full({1}, 0xffff, ints()), 7);
    EXPECT_TRUE(nan.isnan().item<bool>()) << bits;
  }
}

TEST(Rounding, RandomBitsAreUniformAndIndependent) {
  constexpr int64_t kCount = 1 << 16;
  Tensors all;
  for (const uint64_t key : {1, 2}) { // two steps
    for (const auto& bits : detail::random_bits(at::arange(kCount, ints()), key)) {
      EXPECT_GE(bits.min().item<int64_t>(), 0);
      EXPECT_LT(bits.max().item<int64_t>(), 65536);
      all.push_back(bits.to(at::kDouble));
    }
  }
  auto rows = at::stack(all);
  EXPECT_LT((rows.mean(1) - 32767.5).abs().max().item<double>(), 500);
  // Each with itself, moved by one element or by one row of a matrix, and with the others.
  rows = at::cat({rows, rows.roll(1, 1), rows.roll(256, 1)});
  const auto correlations = at::corrcoef(rows) - at::eye(rows.size(0), rows.options());
  EXPECT_LT(correlations.abs().max().item<double>(), 0.03);
}

TEST(Rounding, ElementsHaveTheirNumbersInTheWhole) {
  for (const int n : {1, 2, 3, 4}) {
    for (const int64_t dim : {0, 1, 2}) {
      run_ranks(n, [&](int) {
        SCOPED_TRACE_OF(n, dim);
        auto net = seeded<Holder>(std::vector<int64_t>{5, 4, 7});
        fully_shard(net, {.shard_placement_fn = [&](const auto&, const auto&) {
                      return std::optional<ShardPlacement>(Shard{dim});
                    }});
        expect_numbers(net->weight);
      });
    }
  }
}

TEST(Rounding, ElementsOfTensorParallelParameters) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    auto net = seeded<MLP>(6);
    parallelize_module(
        net, mesh["tp"], {{"in_proj", ColwiseParallel{}}, {"out_proj", RowwiseParallel{}}});
    fully_shard(net, {.mesh = mesh["dp"]});
    for (const auto& param : net->parameters()) {
      expect_numbers(param);
    }
  });
}

// ------------------------------------------------------------ Moments

struct Stored {
  at::Tensor values, scale;
  detail::Moment moment(bool is_square) {
    return {values, scale, is_square};
  }
};

TEST(Moments, EightBitsKeepThreeBitsOfMantissa) {
  for (const bool is_square : {false, true}) {
    for (const int64_t numel : {1, 255, 256, 1000}) {
      SCOPED_TRACE_OF(is_square, numel);
      // Four orders of magnitude.
      auto floats = at::exp(torch::rand({numel}, generator(1)) * 9.2 - 20).to(test_device());
      floats = is_square ? floats.square() : floats;
      Stored stored;
      const auto moment = stored.moment(is_square);
      moment.make(floats, kEightBits);
      EXPECT_EQ(stored.scale.numel(), (numel + 255) / 256);
      EXPECT_EQ(moment.read(0, numel).abs().sum().item<double>(), 0);
      moment.write(0, floats.clone(), {});
      const auto once = moment.read(0, numel);
      EXPECT_LT(((once - floats) / floats).abs().max().item<double>(), is_square ? 0.13 : 0.0626);
      moment.write(0, once.clone(), {});
      EXPECT_SAME(moment.read(0, numel), once); // nothing more is lost
    }
  }
}

TEST(Moments, WhatWasReadCanBeStoredAgain) {
  for (const bool is_square : {false, true}) {
    for (int seed = 0; seed < 200; ++seed) {
      SCOPED_TRACE_OF(is_square, seed);
      // Six orders of magnitude: some are nearly zero beside others.
      auto floats = at::exp(torch::rand({600}, generator(seed)) * 14).to(test_device());
      floats = is_square ? floats.square() : floats - 1000;
      Stored stored;
      const auto moment = stored.moment(is_square);
      moment.make(floats, kEightBits);
      moment.write(0, floats.clone(), detail::random_bits(at::arange(600, ints()), seed)[0]);
      const auto once = moment.read(0, 600);
      EXPECT_SAME(once.to(at::kBFloat16).to(at::kFloat), once); // as state dicts hold it
      moment.write(0, once.clone(), {});
      EXPECT_SAME(moment.read(0, 600), once);
    }
  }
}

// Small numbers, too, are right on average: they do not stay as they are for ever.
TEST(Moments, SmallOnesBesideLargeOnesDecay) {
  for (const bool is_square : {false, true}) {
    Stored stored;
    const auto moment = stored.moment(is_square);
    auto floats = torch::full({256}, 1e-4, test_device());
    floats[0] = 1;
    floats = is_square ? floats.square() : floats;
    moment.make(floats, kEightBits);
    moment.write(0, floats.clone(), {});
    for (int step = 0; step < 200; ++step) {
      auto now = moment.read(0, 256);
      now.slice(0, 1).mul_(0.9);
      moment.write(0, now, detail::random_bits(at::arange(256, ints()), step)[0]);
    }
    const auto left = moment.read(0, 256).slice(0, 1).max().item<double>();
    EXPECT_LE(left, is_square ? 2.5e-10 : 0);
  }
}

TEST(Moments, TheSecondOneIsNeverZeroBesideLargerOnes) {
  Stored stored;
  const auto moment = stored.moment(/*is_square=*/true);
  const auto floats = torch::tensor({1.0F, 1e-30F, 0.0F}).to(test_device());
  moment.make(floats, kEightBits);
  moment.write(0, floats.clone(), {});
  EXPECT_GT(moment.read(0, 3).min().item<double>(), 0);
  moment.write(0, torch::zeros({3}, test_device()), {});
  EXPECT_EQ(moment.read(0, 3).abs().sum().item<double>(), 0);
}

TEST(Moments, WhatIsNotFiniteStaysSo) {
  Stored stored;
  const auto moment = stored.moment(/*is_square=*/false);
  const auto floats =
      torch::tensor({1.0F, std::numeric_limits<float>::infinity()}).to(test_device());
  moment.make(floats, kEightBits);
  moment.write(0, floats.clone(), {});
  EXPECT_FALSE(moment.read(0, 2).isfinite().all().item<bool>());
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
