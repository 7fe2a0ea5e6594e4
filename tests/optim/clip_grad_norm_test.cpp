// Norms of sharded gradients, and what is left of them, against the unsharded ones.
#include <fsdp/clip_grad_norm.h>
#include <fsdp/debug.h>

#include <cmath>
#include <limits>

#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;
using Tensors = std::vector<torch::Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// The norm of all gradients as one vector, in double; clips them by it. Torch's
/// own, in C++, counts tensors instead of elements for order 0.
double clip_by_hand(const Tensors& params, double max_norm, double order) {
  Tensors flat;
  for (const auto& param : params) {
    if (param.grad().defined()) {
      flat.push_back(param.grad().reshape(-1).to(torch::kDouble));
    }
  }
  const auto total = at::linalg_vector_norm(torch::cat(flat), order).item<double>();
  for (const auto& param : params) {
    if (param.grad().defined()) {
      param.mutable_grad().mul_(std::min(1.0, max_norm / (total + 1e-6)));
    }
  }
  return total;
}

Tensors copies_of_grads(const Tensors& params) {
  Tensors copies;
  for (const auto& param : params) {
    copies.push_back(param.grad().clone());
  }
  return copies;
}

double largest_norm(const Tensors& params, double order) {
  double largest = 0;
  for (const auto& param : params) {
    if (param.grad().numel() > 0) {
      largest = std::max(largest, at::linalg_vector_norm(param.grad(), order).item<double>());
    }
  }
  return largest;
}

/// The same batch everywhere: then a parameter that is not sharded has the same
/// gradient everywhere.
torch::Tensor same_batch(int step, at::IntArrayRef sizes) {
  return torch::randn(sizes, generator(step)).to(test_device());
}

MLP sharded_mlp(const FullyShardOptions& options = {}) {
  auto net = seeded<MLP>(6);
  fully_shard(net, options);
  net(random_batch(0, {4, 6})).sum().backward();
  return net;
}

// ------------------------------------------------------------ Norms and clipped gradients

TEST(ClipGradNorm, ATransformersEqualsTorchs) {
  for (const int n : {1, 2, 3, 4}) {
    run_ranks(n, [n](int) {
      for (const double order : {2.0, 1.0, kInfinity}) {
        SCOPED_TRACE_OF(order);
        auto [net, reference] = twins<Transformer>(ModelArgs{.dropout_p = 0});
        shard_transformer(net);
        const auto params = unique_parameters(*net);
        const auto expected_params = unique_parameters(*reference);
        for (int step = 0; step < 10; ++step) {
          for (auto* each : {&net, &reference}) {
            (*each)->zero_grad(/*set_to_none=*/step % 2 == 0);
            (*each)(random_tokens(0, {3, 16}, net->args.vocab_size)).sum().backward();
          }
          average_gradients(*reference);
          expect_parity(*net, *reference);
          const auto before = copies_of_grads(params);
          EXPECT_GT(largest_norm(params, order), 1);
          EXPECT_GT(largest_norm(expected_params, order), 1);

          const double expected = torch::nn::utils::clip_grad_norm_(expected_params, 1, order);
          CommDebugMode comm;
          const auto total = clip_grad_norm_(params, 1, order);
          EXPECT_EQ(comm.count("all_reduce"), n == 1 ? 0 : 1);
          EXPECT_EQ(comm.total(), n == 1 ? 0 : 1);
          EXPECT_EQ(total.scalar_type(), torch::kFloat);
          EXPECT_EQ(total.dim(), 0);
          EXPECT_NEAR(total.item<double>(), expected, 1e-4 * expected);
          expect_parity(*net, *reference);
          EXPECT_LE(largest_norm(params, order), 1 + 1e-5);
          EXPECT_LE(largest_norm(expected_params, order), 1 + 1e-5);
          for (size_t i = 0; i < params.size(); ++i) {
            const auto scaled = before[i] / (total + 1e-6);
            EXPECT_TRUE(torch::allclose(params[i].grad(), scaled, 1e-5, 0)) << i;
          }
          // What is left has just this norm.
          EXPECT_NEAR(clip_grad_norm_(params, 1, order).item<double>(), 1, 1e-4);
        }
      }
    });
  }
}

/// Sharded along dim 1; with a row for one rank alone; frozen; and not sharded.
struct OddImpl : torch::nn::Module {
  OddImpl()
      : wide(register_module("wide", linear(12, 5))),
        narrow(register_module("narrow", linear(5, 1))),
        gain(register_parameter("gain", torch::full({5}, 0.5))) {
    wide->bias.set_requires_grad(false);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return narrow(torch::tanh(wide(x)) * gain);
  }
  Linear wide, narrow;
  torch::Tensor gain;
};
FSDP_MODULE(Odd);

TEST(ClipGradNorm, EveryOrderOfUnevenEmptyFrozenAndIgnoredOnes) {
  for (const int n : {1, 2, 3, 4}) {
    run_ranks(n, [n](int rank) {
      auto [net, reference] = twins<Odd>();
      fully_shard(
          net, {.shard_placement_fn =
                    [](const std::string& name, const torch::Tensor&) {
                      return Shard{name == "wide.weight" ? 1 : 0};
                    },
                .ignored_params = {net->gain}});
      EXPECT_EQ(net->wide->weight.sizes(), (std::vector<int64_t>{5, 12 / n}));
      EXPECT_EQ(net->narrow->weight.size(0), rank == 0 ? 1 : 0);
      for (const double order : {2.0, 1.0, 3.0, kInfinity, 0.5, 0.0, -kInfinity, -1.0}) {
        SCOPED_TRACE_OF(order);
        for (auto* each : {&net, &reference}) {
          (*each)->zero_grad();
          (*each)(same_batch(1, {4, 12})).sum().backward();
        }
        // Half of the norm: a small one is clipped as visibly as a large one.
        const auto expected_params = unique_parameters(*reference);
        const double half = clip_by_hand(expected_params, kInfinity, order) / 2;
        const double expected = clip_by_hand(expected_params, half, order);
        CommDebugMode comm;
        const auto total = clip_grad_norm_(net->parameters(), half, order);
        EXPECT_EQ(comm.total(), n == 1 ? 0 : 1);
        EXPECT_NEAR(total.item<double>(), expected, 1e-4 * expected + 1e-6);
        expect_parity(*net, *reference);
        EXPECT_FALSE(net->wide->bias.grad().defined());
      }
    });
  }
}

TEST(ClipGradNorm, OneReductionForEachMesh) {
  run_ranks(4, [](int) {
    auto [net, reference] = twins<MLP>(6);
    const auto pairs = init_device_mesh(test_device(), {2, 2}, {"a", "b"})["b"];
    fully_shard(
        net, {.shard_placement_fn = [&](const std::string& name,
                                        const torch::Tensor&) -> std::optional<ShardPlacement> {
          return name == "in_proj.weight" ? std::optional(ShardPlacement{0, pairs}) : std::nullopt;
        }});
    net(same_batch(1, {4, 6})).sum().backward();
    reference(same_batch(1, {4, 6})).sum().backward();
    const double expected = clip_by_hand(reference->parameters(), 0.5, 2);
    CommDebugMode comm;
    const auto total = clip_grad_norm_(net->parameters(), 0.5);
    ASSERT_EQ(comm.count("all_reduce"), 2);
    EXPECT_EQ(comm.total(), 2);
    EXPECT_NE(comm.calls()[0].group, comm.calls()[1].group);
    EXPECT_NEAR(total.item<double>(), expected, 1e-5 * expected);
    expect_parity(*net, *reference);
  });
}

TEST(ClipGradNorm, ATiedWeightCountsOnce) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Transformer>(ModelArgs{.dropout_p = 0});
    shard_transformer(net);
    transformer_loss(net, 0).backward();
    transformer_loss(reference, 0).backward();
    average_gradients(*reference);
    ASSERT_GT(net->parameters().size(), unique_parameters(*net).size());
    const double expected = clip_by_hand(unique_parameters(*reference), 10, 2);
    EXPECT_GT(expected, 20);
    const auto total = clip_grad_norm_(net->parameters(), 10);
    EXPECT_NEAR(total.item<double>(), expected, 1e-5 * expected);
    expect_parity(*net, *reference);
  });
}

TEST(ClipGradNorm, BelowTheLimitNothingChangesButVersions) {
  run_ranks(2, [](int) {
    const auto net = sharded_mlp();
    const auto params = net->parameters();
    const auto before = copies_of_grads(params);
    std::vector<uint32_t> versions;
    for (const auto& param : params) {
      versions.push_back(param.grad()._version());
    }
    const auto total = clip_grad_norm_(params, 1e6);
    EXPECT_GT(total.item<double>(), 0);
    EXPECT_FALSE(total.requires_grad());
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_SAME(params[i].grad(), before[i]);
      EXPECT_GT(params[i].grad()._version(), versions[i]);
    }
  });
}

TEST(ClipGradNorm, SeveralDtypesAndDevices) {
  std::vector<torch::Device> devices{torch::kCPU};
  if (torch::cuda::is_available()) {
    devices.emplace_back(torch::kCUDA, 0);
  }
  for (const bool with_double : {false, true}) {
    SCOPED_TRACE_OF(with_double);
    Tensors params;
    for (const auto device : devices) {
      for (const auto dtype :
           {torch::kHalf, torch::kBFloat16, torch::kFloat,
            with_double ? torch::kDouble : torch::kFloat}) {
        params.push_back(torch::zeros({4}, torch::TensorOptions(dtype).device(device)));
        params.back().mutable_grad() = torch::full_like(params.back(), 60000);
      }
    }
    // More than the largest half.
    const double expected = 60000 * 2 * std::sqrt(params.size());
    const auto total = clip_grad_norm_(params, expected / 2);
    EXPECT_EQ(total.scalar_type(), with_double ? torch::kDouble : torch::kFloat);
    EXPECT_EQ(total.device(), devices[0]);
    EXPECT_NEAR(total.item<double>(), expected, 2e-3 * expected); // 60000 is 59904 in bfloat16
    for (const auto& param : params) {
      EXPECT_TRUE(torch::allclose(
          param.grad().to(torch::kDouble), torch::tensor(3e4, torch::kDouble), 5e-3))
          << param.grad();
    }
  }
}

// ------------------------------------------------------------ Without gradients

TEST(ClipGradNorm, OfNothingIsZero) {
  EXPECT_EQ(clip_grad_norm_({}, 1).item<double>(), 0);
  for (const int n : {1, 2}) {
    run_ranks(n, [n](int) {
      auto net = seeded<MLP>(6);
      fully_shard(net);
      for (const double order : {2.0, kInfinity, 0.0, -1.0, -kInfinity}) {
        SCOPED_TRACE_OF(order);
        CommDebugMode comm;
        const auto total = clip_grad_norm_(net->parameters(), 1, order, true);
        EXPECT_EQ(total.item<double>(), 0);
        EXPECT_EQ(comm.total(), n == 1 ? 0 : 1); // another rank might have some
      }
    });
  }
}

TEST(ClipGradNorm, AGradientThatOneRankLacksCountsAsZeroThere) {
  for (const int n : {2, 3, 4}) {
    run_ranks(n, [n](int rank) {
      auto net = sharded_mlp();
      auto reference = seeded<MLP>(6);
      reference(random_batch(0, {4, 6})).sum().backward();
      average_gradients(*reference);
      reference->in_proj->weight.grad().chunk(n)[1].zero_();
      const double expected = clip_by_hand(reference->parameters(), 0.5, 2);
      if (rank == 1) {
        net->in_proj->weight.mutable_grad() = torch::Tensor();
      }
      const auto total = clip_grad_norm_(net->parameters(), 0.5);
      EXPECT_NEAR(total.item<double>(), expected, 1e-5 * expected);
      for (const auto& item : reference->named_parameters()) {
        const auto param = net->named_parameters()[item.key()];
        if (param.grad().defined()) {
          EXPECT_TRUE(near(param.grad(), part_of(item.value().grad(), param), 1e-5)) << item.key();
        }
      }
    });
  }
}

// ------------------------------------------------------------ Not finite

TEST(ClipGradNorm, OneRanksNonfiniteGradientIsEveryRanks) {
  for (const int n : {2, 3, 4}) {
    run_ranks(n, [](int rank) {
      for (const double value : {kInfinity, kNaN}) {
        for (const double order : {2.0, 1.0, 0.5, kInfinity}) {
          SCOPED_TRACE_OF(value, order);
          auto net = sharded_mlp();
          const auto params = net->parameters();
          if (rank == 1) {
            net->in_proj->weight.mutable_grad().view(-1)[0].fill_(value);
          }
          const auto before = copies_of_grads(params);
          const auto message =
              message_of<c10::Error>([&] { clip_grad_norm_(params, 1, order, true); });
          EXPECT_TRUE(contains(message, "is non-finite"));
          EXPECT_TRUE(contains(message, "Not finite: 'in_proj.weight'. "));
          EXPECT_TRUE(contains(message, "error_if_nonfinite = false"));
          for (size_t i = 0; i < params.size(); ++i) {
            EXPECT_SAME(params[i].grad(), before[i]);
          }

          // Without the error they are scaled by what it is: as torch does.
          const auto total = clip_grad_norm_(params, 1, order).item<double>();
          EXPECT_EQ(std::isnan(value), std::isnan(total));
          EXPECT_EQ(std::isinf(value), std::isinf(total));
          const auto& other = net->out_proj->weight.grad();
          EXPECT_TRUE((std::isnan(value) ? other.isnan() : other == 0).all().item<bool>());

          net->zero_grad();
          net(random_batch(0, {4, 6})).sum().backward();
          EXPECT_GT(clip_grad_norm_(params, 1, order, true).item<double>(), 0);
        }
      }
    });
  }
}

TEST(ClipGradNorm, ManyNonfiniteOnesAreNotAllNamed) {
  Tensors params;
  for (int i = 0; i < 14; ++i) {
    params.push_back(torch::zeros({2}));
    params.back().mutable_grad() = torch::full({2}, i == 2 ? 1 : kNaN);
  }
  const auto message = message_of<c10::Error>([&] { clip_grad_norm_(params, 1, 2, true); });
  EXPECT_TRUE(contains(message, "Not finite: parameter #0, parameter #1, parameter #3, "));
  EXPECT_TRUE(contains(message, "parameter #10 and 3 more. "));
  EXPECT_FALSE(contains(message, "parameter #11"));
}

// ------------------------------------------------------------ Refused

TEST(ClipGradNorm, RefusesBadInputBeforeAnyCollective) {
  run_ranks(2, [](int) {
    auto net = sharded_mlp();
    const auto params = net->parameters();
    const auto plain = torch::zeros({4, 2});
    CommDebugMode comm;
    const auto refusal = [](const Tensors& given, double max_norm = 1, double order = 2) {
      return message_of<c10::ValueError>([&] { clip_grad_norm_(given, max_norm, order); });
    };
    EXPECT_TRUE(contains(refusal({params[0], torch::Tensor()}), "parameter #1 is an undefined"));
    EXPECT_TRUE(contains(refusal(params, -1), "max_norm must be zero or more, got -1"));
    EXPECT_TRUE(contains(refusal(params, kNaN), "max_norm must be zero or more, got nan"));
    EXPECT_TRUE(contains(refusal(params, 1, kNaN), "norm_type"));

    plain.mutable_grad() = torch::ones({4, 2}).to_sparse();
    EXPECT_TRUE(
        contains(refusal({params[0], plain}), "parameter #1 has a gradient of layout Sparse"));
    params[0].mutable_grad() = torch::ones({12, 6}).to_sparse();
    EXPECT_TRUE(contains(refusal(params), "'in_proj.weight' has a gradient of layout Sparse"));
    params[0].mutable_grad() = torch::ones({24, 6}); // from before sharding
    const auto sizes = refusal(params);
    EXPECT_TRUE(contains(sizes, "'in_proj.weight' has a gradient of sizes [24, 6]"));
    EXPECT_TRUE(contains(sizes, "[12, 6]. Call zero_grad()"));
    EXPECT_EQ(comm.total(), 0);

    net->zero_grad();
    net(random_batch(0, {4, 6})).sum().backward();
    EXPECT_GT(clip_grad_norm_(params, 0).item<double>(), 0); // zero is allowed
    for (const auto& param : params) {
      EXPECT_TRUE(param.grad().eq(0).all().item<bool>());
    }
  });
}

} // namespace
} // namespace fsdp
