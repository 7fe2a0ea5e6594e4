// Stochastic rounding, and moments that are stored in 16 or 8 bits.
#include <fsdp/tensor_parallel.h>

#include <cmath>
#include <limits>

#include "optim/moment.h"
#include "optim/rounding.h"
#include "param/param_placement.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;
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
    for (const ShardPlacement& placement :
         std::vector<ShardPlacement>{Shard{0}, Shard{1}, Shard{2}, BlockShard{2}, BlockShard{3}}) {
      run_ranks(n, [&](int) {
        SCOPED_TRACE_OF(n, placement.dim, placement.merged_dims);
        auto net = seeded<Holder>(std::vector<int64_t>{5, 4, 7});
        fully_shard(net, {.shard_placement_fn = [&](const auto&, const auto&) {
                      return std::optional(placement);
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
    SCOPED_TRACE_OF(is_square);
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

} // namespace
} // namespace fsdp
