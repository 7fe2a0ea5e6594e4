// Ranks that call different modules, or in another order, get an error that says who did what.
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

/// Modules of the same sizes. `order` says which of them run.
struct ChoicesImpl : torch::nn::Module {
  ChoicesImpl() {
    for (int i = 0; i < 3; ++i) {
      choices.push_back(register_module("choice" + std::to_string(i), linear(4, 4)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto i : order) {
      x = choices[i](x);
    }
    return x;
  }
  std::vector<Linear> choices;
  std::vector<size_t> order{0, 1, 2};
};
FSDP_MODULE(Choices);

/// Trains a few steps in one order, then lets rank 1 choose another one. Returns the error.
std::string error_of(int num_ranks, bool one_group, const std::vector<size_t>& order) {
  return message_of<CommError>([&] {
    run_ranks(num_ranks, [&](int rank) {
      auto net = seeded<Choices>();
      if (!one_group) {
        for (auto& choice : net->choices) {
          fully_shard(choice);
        }
      }
      fully_shard(net);
      for (int step = 0; step < 3; ++step) {
        net(random_batch(step, {2, 4})).sum().backward();
      }
      net->order = rank == 1 ? order : std::vector<size_t>{0, 1};
      net(random_batch(3, {2, 4})).sum().backward();
    });
  });
}

TEST(Agreement, AnotherOrder) {
  for (const int n : {2, 4}) {
    SCOPED_TRACE_OF(n);
    const auto message = error_of(n, /*one_group=*/false, {1, 0});
    EXPECT_TRUE(contains(message, "the ranks brought different calls"));
    EXPECT_TRUE(contains(message, "rank 0: all_gather of module 'choice0'"));
    EXPECT_TRUE(contains(message, "rank 1: all_gather of module 'choice1'"));
  }
}

TEST(Agreement, AnotherModule) {
  const auto message = error_of(2, /*one_group=*/false, {0, 2});
  EXPECT_TRUE(contains(message, "rank 0: all_gather of module 'choice1'"));
  EXPECT_TRUE(contains(message, "rank 1: all_gather of module 'choice2'"));
}

// Names do not tell the roots of two models apart, but the order in which they were made does.
TEST(Agreement, AnotherModelOfTheSameKind) {
  for (const int n : {2, 3}) {
    for (const bool from_the_beginning : {false, true}) {
      SCOPED_TRACE_OF(n, from_the_beginning);
      const auto message = message_of<CommError>([&] {
        run_ranks(n, [&](int rank) {
          std::vector<MLP> models;
          for (int i = 0; i < 2; ++i) {
            models.push_back(seeded<MLP>(4));
            fully_shard(models.back());
          }
          const auto x = random_batch(0, {2, 4});
          for (int step = 0; step < (from_the_beginning ? 0 : 2); ++step) {
            models[1](models[0](x)).sum().backward(); // they are no error
          }
          models[rank == 1 ? 1 : 0](x);
        });
      });
      EXPECT_TRUE(contains(message, "rank 0: all_gather of the root module"));
      EXPECT_TRUE(
          contains(message, "rank 1: all_gather of the root module of model 2 of its kind"));
    }
  }
}

// The layers of a model may be sharded in any order.
TEST(Agreement, TheOrderOfShardingIsNoDifference) {
  run_ranks(2, [](int rank) {
    auto [net, reference] = twins<Stack>(6);
    for (size_t i = 0; i < net->mlps.size(); ++i) {
      fully_shard(net->mlps[rank == 0 ? i : net->mlps.size() - 1 - i]);
    }
    fully_shard(net);
    train_and_compare(net, reference, [](Stack& each, int step) {
      return each(random_batch(step, {2, 6})).sum();
    });
  });
}

// All are gathered, and only the gradients are of different parameters.
TEST(Agreement, OtherParametersOfOneGroup) {
  const auto message = error_of(2, /*one_group=*/true, {0, 2});
  EXPECT_TRUE(contains(
      message,
      "rank 0: reduce_scatter of the root module, for its parameters choice0.weight, choice0.bias, "
      "choice1.weight, choice1.bias alone"));
  EXPECT_TRUE(contains(message, "rank 1: reduce_scatter of the root module, for its parameters"));
}

TEST(Agreement, UnusedParametersAsZerosAreNoDifference) {
  run_ranks(2, [](int rank) {
    auto [net, reference] = twins<Choices>();
    fully_shard(net).set_reduce_scatter_unused_params(true);
    net->order = rank == 0 ? std::vector<size_t>{0, 1} : std::vector<size_t>{0, 2};
    net(random_batch(0, {2, 4})).sum().backward();
    for (const auto& param : net->parameters()) {
      EXPECT_TRUE(param.grad().defined());
    }
  });
}

} // namespace
} // namespace fsdp
