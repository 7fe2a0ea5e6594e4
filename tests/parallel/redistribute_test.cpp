#include <fsdp/redistribute.h>

#include <torch/torch.h>

#include <fsdp/debug.h>
#include <fsdp/distributed.h>
#include <fsdp/dtensor.h>

#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

torch::Tensor noise(uint64_t seed, at::IntArrayRef sizes) {
  return torch::randn(sizes, generator(seed), torch::kDouble);
}

/// What this rank holds of `whole` when it lies so. Of a sum the terms are random.
torch::Tensor placed(const torch::Tensor& whole, const DeviceMesh& mesh, const Placement& as) {
  if (!std::holds_alternative<Partial>(as)) {
    return DTensor::from_local(whole, mesh, {Replicate{}}).redistribute({as}).to_local();
  }
  const auto rank = mesh.get_local_rank();
  auto term = noise(7 + rank, whole.sizes());
  if (rank == 0) {
    term = whole;
    for (int64_t other = 1; other < mesh.size(); ++other) {
      term = term - noise(7 + other, whole.sizes());
    }
  }
  return term;
}

class Redistribute : public testing::TestWithParam<int> {};

// Values, and gradients of a loss in which every element counts differently.
TEST_P(Redistribute, MovesValuesThereAndGradientsBack) {
  const int n = GetParam();
  run_ranks(n, [&](int rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {n}, {"tp"});
    const std::vector<Placement> all{Replicate{}, Partial{}, Shard{0}, Shard{1}, Shard{-1}};
    for (const auto& sizes : {std::vector<int64_t>{4, 12, 2}, {5, 7, 3}, {1, 2, 3}}) {
      const auto whole = noise(1, sizes);
      const auto weight = noise(2, sizes);
      for (const auto& from : all) {
        for (const auto& to : all) {
          SCOPED_TRACE(c10::str(to_string(from), " to ", to_string(to), " of ", sizes));
          const auto x = placed(whole, mesh, from).clone().requires_grad_();
          const auto y = redistribute(x, mesh, from, to, {.sizes = sizes});
          if (std::holds_alternative<Partial>(to)) {
            const auto sum = y.detach().clone();
            mesh.get_group().all_reduce(sum);
            EXPECT_CLOSE(sum, whole);
            (redistribute(y, mesh, to, Replicate{}) * weight).sum().backward();
          } else {
            EXPECT_CLOSE(y.detach(), placed(whole, mesh, to));
            (y * placed(weight, mesh, to)).sum().backward();
          }
          const bool partial = std::holds_alternative<Partial>(from);
          EXPECT_CLOSE(
              x.grad(), partial ? weight : placed(weight, mesh, from)); // that of a term is whole
        }
        SCOPED_TRACE(c10::str(to_string(from), ", each rank with its own loss, of ", sizes));
        const auto x = placed(whole, mesh, from).clone().requires_grad_();
        const auto y =
            redistribute(x, mesh, from, Replicate{}, {.grad_placement = Partial{}, .sizes = sizes});
        EXPECT_CLOSE(y.detach(), whole);
        (y * noise(100 + rank, sizes)).sum().backward();
        auto sum = torch::zeros(sizes, torch::kDouble);
        for (int other = 0; other < n; ++other) {
          sum += noise(100 + other, sizes);
        }
        const bool partial = std::holds_alternative<Partial>(from);
        EXPECT_CLOSE(x.grad(), partial ? sum : placed(sum, mesh, from));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    WorldSizes, Redistribute, testing::Values(1, 2, 3, 4), testing::PrintToStringParamName());

TEST(Redistribution, CollectivesOfEachMove) {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {2}, {"tp"});
    const auto calls = [&](Placement from, Placement to, std::optional<Placement> grad = {}) {
      CommDebugMode comm;
      const auto x = torch::ones({4, 4}).requires_grad_();
      auto y = redistribute(x, mesh, from, to, {.grad_placement = grad});
      std::string text;
      for (const auto& call : comm.calls()) {
        text += call.op + " ";
      }
      comm.clear();
      y.sum().backward();
      text += "|";
      for (const auto& call : comm.calls()) {
        text += " " + call.op;
      }
      return text;
    };
    EXPECT_EQ(calls(Replicate{}, Replicate{}), "|");
    EXPECT_EQ(calls(Replicate{}, Replicate{}, Partial{}), "| all_reduce");
    EXPECT_EQ(calls(Partial{}, Replicate{}), "all_reduce |");
    EXPECT_EQ(calls(Partial{}, Shard{1}), "reduce_scatter | all_gather");
    EXPECT_EQ(calls(Shard{1}, Replicate{}), "all_gather |");
    EXPECT_EQ(calls(Shard{1}, Replicate{}, Partial{}), "all_gather | reduce_scatter");
    EXPECT_EQ(calls(Replicate{}, Shard{0}), "| all_gather");
    EXPECT_EQ(calls(Shard{0}, Shard{1}), "all_to_all | all_to_all");
    EXPECT_EQ(calls(Shard{1}, Shard{-1}), "|");
    EXPECT_EQ(calls(Replicate{}, Partial{}), "|");
    EXPECT_EQ(calls(Partial{}, Partial{}), "|");
  });
}

TEST(Redistribution, OneRankDoesNothing) {
  run_ranks(1, [](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {1}, {"tp"});
    CommDebugMode comm;
    const auto x = torch::ones({3, 2}).requires_grad_();
    EXPECT_TRUE(redistribute(x, mesh, Partial{}, Shard{0}).is_same(x));
    EXPECT_TRUE(
        redistribute(x, mesh, Shard{1}, Replicate{}, {.grad_placement = Partial{}}).is_same(x));
    EXPECT_EQ(comm.total(), 0);
  });
}

TEST(Redistribution, WithoutGradientsNothingIsRecorded) {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {3}, {"tp"});
    const auto whole = noise(1, {4, 5});
    const auto x = placed(whole, mesh, Shard{1}).requires_grad_();
    {
      at::NoGradGuard no_grad;
      const auto y = redistribute(x, mesh, Shard{1}, Replicate{}, {.sizes = {{4, 5}}});
      EXPECT_FALSE(y.requires_grad());
      EXPECT_CLOSE(y, whole);
    }
    c10::InferenceMode inference;
    const auto y = redistribute(whole + 0, mesh, Replicate{}, Shard{0});
    EXPECT_CLOSE(redistribute(y, mesh, Shard{0}, Replicate{}, {.sizes = {{4, 5}}}), whole);
    const auto tokens = torch::arange(6);
    EXPECT_SAME(redistribute(tokens, mesh, Replicate{}, Replicate{}), tokens);
  });
}

TEST(Redistribution, UsedTwiceAndTwiceDifferentiated) {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2}, {"tp"});
    const auto weights = std::vector{noise(1, {4}), noise(2, {4})};
    const auto x = noise(3, {4}).requires_grad_();
    const auto y = redistribute(x, mesh, Replicate{}, Replicate{}, {.grad_placement = Partial{}});
    // sum_r w_r x^2, and beside it the sum of x, which all ranks compute alike
    const auto loss = (weights[rank] * y * y).sum();
    const auto grad = torch::autograd::grad(
        {loss + x.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    const auto sum = weights[0] + weights[1];
    EXPECT_CLOSE(grad.detach(), 2 * sum * x.detach() + 1);
    const auto direction = noise(4, {4});
    (grad * direction).sum().backward();
    EXPECT_CLOSE(x.grad(), 2 * sum * direction);
  });
}

TEST(Redistribution, ResultsMayBeEditedButNotViewsOfTheInput) {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {2}, {"tp"});
    const std::vector<Placement> all{Replicate{}, Partial{}, Shard{0}, Shard{1}};
    for (const auto& from : all) {
      for (const auto& to : all) {
        SCOPED_TRACE(to_string(from) + " to " + to_string(to));
        const auto x = torch::ones({4, 4}).requires_grad_();
        auto y = redistribute(x, mesh, from, to);
        if (y.is_same(x) || y.is_alias_of(x)) {
          continue;
        }
        y.mul_(3);
        y.sum().backward();
        EXPECT_SAME(x.grad(), torch::full({4, 4}, 3.0));
      }
    }
    const auto x = torch::ones({4}).requires_grad_() * 1;
    auto y = redistribute(x, mesh, Replicate{}, Replicate{}, {.grad_placement = Partial{}});
    EXPECT_THROW(y.mul_(2), c10::Error);
  });
}

// Lengths are exchanged from the first uneven division on, along that dim.
TEST(Redistribution, UnevenPartsFindTogetherAgain) {
  run_ranks(3, [](int rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {3}, {"tp"});
    CommDebugMode comm;
    const auto gathered = [&](const torch::Tensor& local) {
      comm.clear();
      return redistribute(local, mesh, Shard{1}, Replicate{});
    };
    EXPECT_EQ(gathered(torch::ones({2, 4})).size(1), 12);
    EXPECT_EQ(comm.total(), 1);
    const auto whole = noise(1, {2, 7});
    const auto part = redistribute(whole, mesh, Replicate{}, Shard{1});
    EXPECT_EQ(part.size(1), rank < 2 ? 3 : 1);
    EXPECT_CLOSE(gathered(part), whole);
    EXPECT_EQ(comm.count("all_gather"), 2);
    EXPECT_EQ(gathered(torch::ones({2, 4})).size(1), 12); // other lengths, too
    (void)redistribute(torch::ones({6}), mesh, Shard{0}, Replicate{});
    const auto message =
        message_of<c10::ValueError>([&] { gathered(torch::ones({2, rank == 1 ? 3 : 2})); });
    EXPECT_TRUE(contains(message, "have [2, 3, 2], which are not the chunks of 7"));
    EXPECT_TRUE(contains(message, "mesh axis 'tp'"));
  });
}

TEST(Redistribution, RefusesWhatDoesNotFit) {
  run_ranks(4, [](int) {
    const auto grid = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    const auto mesh = grid["tp"];
    const auto x = torch::ones({2, 4});
    CommDebugMode comm;
    const auto refused = [&](const std::string& part, auto&&... args) {
      const auto message = message_of<c10::ValueError>([&] { redistribute(args...); });
      EXPECT_TRUE(contains(message, part));
      return message;
    };
    refused("mesh of one axis, not DeviceMesh(cpu, dp=2, tp=2)", x, grid, Replicate{}, Shard{0});
    EXPECT_TRUE(
        contains(refused("[2, 4], which mesh axis 'tp'", x, mesh, Replicate{}, Shard{2}), "S(2)"));
    refused("cannot be placed _S(0, 2)", x, mesh, StridedShard{0, 2}, Replicate{});
    refused("cannot be placed B(2)", x, mesh, Replicate{}, BlockShard{2});
    refused("cannot be placed B(7)", x, mesh, BlockShard{7}, Replicate{});
    refused("cannot be placed P(avg)", x, mesh, Partial{ReduceOp::Avg}, Replicate{});
    refused("is undefined", torch::Tensor(), mesh, Partial{}, Replicate{});
    refused(
        "a gradient that lies P(sum)", x, mesh, Replicate{}, Shard{0},
        RedistributeOptions{.grad_placement = Partial{}});
    refused(
        "this rank holds [2, 3]", x, mesh, Shard{1}, Replicate{},
        RedistributeOptions{.sizes = {{2, 6}}});
    EXPECT_EQ(comm.total(), 0);
  });
}

} // namespace
} // namespace fsdp
