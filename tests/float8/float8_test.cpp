// Linear layers in float8, alone and sharded. What they compute is compared with torchao, by
// float8_torchao.py.
#include <fsdp/checkpoint.h>
#include <fsdp/debug.h>
#include <fsdp/float8.h>

#include "float8/float8.h"
#include "float8/pair.h"
#include "support/processes.h"

namespace fsdp {
namespace {

using namespace test;

torch::Tensor random(uint64_t seed, at::IntArrayRef sizes) {
  return torch::randn(sizes, generator(seed)).to(test_device());
}

auto loss_with(at::ScalarType dtype) {
  return [dtype](Pair& net, int step) {
    return net(random_batch(step, {3, 5, kDim}).to(dtype)).to(torch::kFloat).square().mean();
  };
}

// ------------------------------------------------------------ Rounding

TEST(Float8, ScalesAreTheSmallestPowersOfTwoInRange) {
  for (const auto& [largest, scale] : std::vector<std::pair<double, double>>{
           {448, 1},
           {449, 2},
           {224, 0.5},
           {225, 1},
           {1, 0x1p-8},
           {0.875, 0x1p-9},
           {3e-5, 0x1p-23}}) {
    const auto values = torch::tensor({largest, -largest / 3, 0.0}, torch::kFloat);
    const auto rounded = detail::to_float8(values, std::nullopt);
    EXPECT_EQ(rounded.scale.item<double>(), scale) << largest;
    EXPECT_TRUE(near(detail::from_float8(rounded, torch::kFloat), values, 0.0626)) << largest;
  }
}

TEST(Float8, AValueIsRoundedOnce) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    const auto values = random(1, {64, 48}).to(dtype);
    for (const auto& first : std::vector<std::optional<int64_t>>{{}, 0, 1}) {
      const auto once = detail::from_float8(detail::to_float8(values, first), dtype);
      EXPECT_FALSE(once.equal(values));
      for (const auto& second : std::vector<std::optional<int64_t>>{{}, 0, 1}) {
        const auto twice = detail::from_float8(detail::to_float8(once, second), dtype);
        // Only values that are tiny beside the largest lose a bit.
        const auto lost = (twice != once).logical_and(once.abs() > once.abs().max() * 0x1p-14);
        EXPECT_FALSE(lost.any().item<bool>());
      }
    }
  }
}

TEST(Float8, ZerosStayAndWhatIsNotFiniteSpreads) {
  const auto inf = std::numeric_limits<float>::infinity();
  for (const auto bad : {inf, -inf, std::nanf("")}) {
    auto values = torch::ones({3, 4});
    values[0].zero_();
    values[1][2] = bad;
    const auto by_rows = detail::from_float8(detail::to_float8(values, 1), torch::kFloat);
    EXPECT_SAME(by_rows[0], values[0]);
    EXPECT_SAME(by_rows[2], values[2]);
    EXPECT_TRUE(by_rows[1].isnan().all().item<bool>()) << bad;
    const auto together = detail::from_float8(detail::to_float8(values, {}), torch::kFloat);
    EXPECT_TRUE(together.isnan().all().item<bool>()) << bad;
  }
  EXPECT_EQ(detail::to_float8(torch::zeros({0, 4}), 1).data.numel(), 0);
  EXPECT_EQ(detail::to_float8(torch::zeros({0, 4}), {}).scale.dim(), 0);
}

// ------------------------------------------------------------ One layer

TEST(Float8Linear, IsCloseToALinearLayer) {
  for (const auto scaling : kScalings) {
    for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
      auto layer = PairImpl::layer(kDim, kHidden, scaling);
      layer->to(test_device(), dtype);
      const auto x = random(2, {4, 7, kDim}).to(dtype).requires_grad_();
      const auto grad = random(3, {4, 7, kHidden}).to(dtype);
      const auto run = [&](auto&& result) {
        const auto grads = torch::autograd::grad({result}, {x, layer->weight, layer->bias}, {grad});
        return std::vector{result.detach(), grads[0], grads[1], grads[2]};
      };
      const auto actual = run(layer(x));
      const auto expected = run(torch::linear(x, layer->weight, layer->bias));
      for (size_t i = 0; i < actual.size(); ++i) {
        ASSERT_EQ(actual[i].scalar_type(), dtype);
        const auto error = (actual[i] - expected[i]).to(torch::kFloat).norm() /
                           expected[i].to(torch::kFloat).norm();
        EXPECT_LT(error.item<double>(), 0.08) << i;
        EXPECT_GT(error.item<double>(), i == 3 ? -1 : 0.005) << i; // the bias is not rounded
      }
    }
  }
}

TEST(Float8Linear, RowsOfOtherSizesDoNotDisturb) {
  const auto weight = random(4, {32, 32});
  auto x = random(5, {32, 32});
  x[0] *= 1e6;
  const auto error_of = [&](Float8Scaling scaling) {
    const auto actual = float8_linear(x, weight, {}, scaling).slice(0, 1);
    const auto expected = torch::linear(x, weight).slice(0, 1);
    return ((actual - expected).norm() / expected.norm()).item<double>();
  };
  EXPECT_LT(error_of(Float8Scaling::rowwise), 0.05);
  EXPECT_GT(error_of(Float8Scaling::tensorwise), 0.5);
}

TEST(Float8Linear, NoRowsAndNoBias) {
  for (const auto scaling : kScalings) {
    auto weight = random(6, {48, 32}).requires_grad_();
    const auto result =
        float8_linear(torch::zeros({0, 3, 32}, weight.options()), weight, {}, scaling);
    EXPECT_EQ(result.sizes(), (std::vector<int64_t>{0, 3, 48}));
    result.sum().backward();
    EXPECT_EQ(weight.grad().abs().max().item<double>(), 0);
    EXPECT_EQ(float8_linear(random(7, {32}), weight, {}, scaling).dim(), 1);
  }
}

TEST(Float8Linear, WhatItCannotDoIsAnError) {
  const auto weight = torch::randn({16, 32}).requires_grad_();
  const auto message = [](auto&& call) { return message_of<c10::Error>(call); };
  EXPECT_TRUE(contains(
      message([&] { float8_linear(torch::randn({4, 31}), weight); }), "does not fit a weight"));
  EXPECT_TRUE(contains(
      message([&] { float8_linear(torch::randn({4, 32}, torch::kDouble), weight); }),
      "must both be fp32, bf16 or fp16"));
  EXPECT_TRUE(contains(
      message([&] { float8_linear(torch::randn({4, 32}), weight[0]); }), "must be a matrix"));
  EXPECT_TRUE(contains(
      message([&] { float8_linear(torch::randn({4, 32}), weight, torch::zeros({2, 4, 16})); }),
      "must be a vector of 16 elements"));
  const auto loss = float8_linear(torch::randn({4, 32}), weight).square().sum();
  EXPECT_TRUE(contains(
      message([&] { torch::autograd::grad({loss}, {weight}, {}, {}, /*create_graph=*/true); }),
      "there is no gradient of its gradient"));
}

TEST(Float8Linear, ACloneStaysInFloat8) {
  nn::Float8Linear layer(torch::nn::LinearOptions(32, 16).bias(false), Float8Scaling::rowwise);
  layer->weight.set_requires_grad(false);
  layer->eval();
  const auto copy = std::dynamic_pointer_cast<nn::Float8LinearImpl>(layer->clone());
  ASSERT_TRUE(copy);
  EXPECT_EQ(copy->scaling, Float8Scaling::rowwise);
  EXPECT_FALSE(copy->weight.requires_grad() || copy->is_training());
  EXPECT_SAME(copy->weight, layer->weight);
  layer->weight.zero_();
  EXPECT_NE(copy->weight.abs().sum().item<double>(), 0);
}

/// torchao has the same scales if it is told to round them to powers of two.
TEST(Float8Linear, IsThatOfTorchao) {
  const std::string python = FSDP_TEST_PYTHON;
  if (python.empty() || run_commands({{{python, "-c", "import torchao"}, {}}})[0].exit_code != 0) {
    GTEST_SKIP() << "torchao is not installed";
  }
  const auto folder = temporary_folder();
  const auto ended =
      run_commands({{{python, FSDP_TEST_DIR "/float8/float8_torchao.py", folder}, {}}})[0];
  ASSERT_EQ(ended.exit_code, 0) << ended.output;
  run_ranks(1, [&](int) {
    for (const auto scaling : kScalings) {
      const std::string name = scaling == Float8Scaling::rowwise ? "rowwise" : "tensorwise";
      SCOPED_TRACE(name);
      const auto x = torch::empty({24, 48}), weight = torch::empty({80, 48});
      const auto grad = torch::empty({24, 80}), result = torch::empty({24, 80});
      const auto grad_x = torch::empty({24, 48}), grad_weight = torch::empty({80, 48});
      StateDict state;
      state.insert("x", x);
      state.insert("weight", weight);
      state.insert("grad", grad);
      state.insert("result", result);
      state.insert("grad_x", grad_x);
      state.insert("grad_weight", grad_weight);
      load(state, folder + "/" + name + ".safetensors");
      x.requires_grad_();
      weight.requires_grad_();
      const auto ours = float8_linear(x, weight, {}, scaling);
      const auto grads = torch::autograd::grad({ours}, {x, weight}, {grad});
      EXPECT_TRUE(near(ours.detach(), result, 1e-5));
      EXPECT_TRUE(near(grads[0], grad_x, 1e-5));
      EXPECT_TRUE(near(grads[1], grad_weight, 1e-5));
    }
  });
}

// ------------------------------------------------------------ Sharded

TEST(Float8AllGather, TrainsAsOneRankDoes) {
  for (const int n : {1, 2, 3}) {
    run_ranks(n, [](int) {
      for (const auto scaling : kScalings) {
        for (const bool reshard : {true, false}) {
          SCOPED_TRACE_OF(reshard);
          auto [net, reference] = twins<Pair>(scaling);
          fully_shard(net->up, {.reshard_after_forward = reshard});
          fully_shard(net, {.reshard_after_forward = reshard});
          send_in_float8(net, scaling);
          train_and_compare(net, reference, loss_with(torch::kFloat));
        }
      }
    });
  }
}

TEST(Float8AllGather, OnReplicasAndOverOtherDims) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "shard"});
    for (const auto scaling : kScalings) {
      auto [net, reference] = twins<Pair>(scaling);
      fully_shard(net, {.mesh = mesh, .shard_placement_fn = [](const auto&, const auto& param) {
                          return ShardPlacement{.dim = param.dim() - 1};
                        }});
      send_in_float8(net, scaling);
      train_and_compare(net, reference, loss_with(torch::kFloat));
    }
  });
}

/// The gathered values are those of a bf16 model, rounded.
TEST(Float8AllGather, InBf16) {
  run_ranks(2, [](int) {
    for (const auto scaling : kScalings) {
      auto [net, reference] = twins<Pair>(scaling);
      auto root = fully_shard(
          net, {.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
      send_in_float8(net, scaling);
      reference->to(torch::kBFloat16);
      const auto loss_of = loss_with(torch::kBFloat16);
      EXPECT_SAME(loss_of(net, 0).detach(), loss_of(reference, 0).detach());
      root.unshard();
      const auto weight = reference->up->weight.detach();
      const auto rounded = detail::to_float8(
          weight, scaling == Float8Scaling::rowwise ? std::optional(1) : std::nullopt);
      EXPECT_TRUE(
          near(net->up->weight.detach(), detail::from_float8(rounded, torch::kBFloat16), 1e-6));
      root.reshard();
    }
  });
}

TEST(Float8AllGather, SendsAByteForEachElement) {
  run_ranks(4, [](int) {
    for (const auto scaling : kScalings) {
      auto net = seeded<Pair>(scaling);
      fully_shard(net);
      send_in_float8(net, scaling);
      const CommDebugMode comms;
      loss_with(torch::kFloat)(net, 0);
      const int64_t scales = scaling == Float8Scaling::rowwise
                                 ? kHidden + kDim
                                 : 4 + 4; // of each row, or of each rank
      EXPECT_EQ(comms.bytes("all_gather"), 2 * kHidden * kDim + 4 * (scales + kHidden + kDim));
    }
  });
}

TEST(Float8AllGather, IsForTwoDimsOrMore) {
  run_ranks(2, [](int) {
    auto net = seeded<Pair>(Float8Scaling::tensorwise);
    auto root = fully_shard(net);
    set_all_gather_extension(net->up->bias, float8_all_gather());
    EXPECT_TRUE(contains(
        message_of<c10::Error>([&] { root.unshard(); }),
        "a parameter of one dim cannot be sent in float8"));
    set_all_gather_extension(net->up->bias, nullptr);
    root.unshard();
  });
}

} // namespace
} // namespace fsdp
