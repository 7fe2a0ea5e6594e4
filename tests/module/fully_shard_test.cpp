// fully_shard against the unsharded model: every parameter on every rank.
#include <ATen/CPUGeneratorImpl.h>
#include <fsdp/distributed.h>
#include <fsdp/fully_shard.h>
#include <torch/torch.h>

#include <mutex>

#include "support/tensors.h"

namespace fsdp {
namespace {

using test::contains;
using test::message_of;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t dim)
      : up(register_module("up", torch::nn::Linear(dim, 3 * dim))),
        down(register_module("down", torch::nn::Linear(3 * dim, dim))) {}
  torch::Tensor forward(torch::Tensor x, double scale = 1.0) {
    TORCH_CHECK(!fail, "as asked");
    return x + scale * down(torch::gelu(up(x)));
  }
  torch::nn::Linear up, down;
  bool fail = false;
};
FSDP_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t dim, int64_t depth) : head(register_module("head", torch::nn::Linear(dim, 3))) {
    for (int64_t i = 0; i < depth; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block(dim)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : blocks) {
      x = block(x);
    }
    return head(x);
  }
  std::vector<Block> blocks;
  torch::nn::Linear head;
};
FSDP_MODULE(Net);

constexpr int64_t kDim = 10; // does not divide by 3 or 4

std::mutex generator; // torch's default one is shared by the ranks

Net make_net() {
  std::lock_guard lock(generator);
  torch::manual_seed(7);
  return Net(kDim, 3);
}

torch::Tensor batch(int step, int rank) {
  return torch::randn({4, kDim}, at::make_generator<at::CPUGeneratorImpl>(100 * step + rank));
}

torch::Tensor loss_of(Net& net, int step, int rank) {
  return net(batch(step, rank)).pow(2).mean();
}

/// This rank's rows of a parameter or gradient.
torch::Tensor shard(const torch::Tensor& whole) {
  const auto rows = (whole.size(0) + get_world_size() - 1) / get_world_size();
  const auto start = std::min<int64_t>(whole.size(0), rows * get_rank());
  return whole.narrow(0, start, std::min(rows, whole.size(0) - start));
}

void expect_equal(const Net& net, const Net& reference, int step) {
  const auto expected = reference->named_parameters();
  for (const auto& item : net->named_parameters()) {
    const auto& whole = expected[item.key()];
    EXPECT_TRUE(torch::allclose(item.value().detach(), shard(whole.detach()), 1e-5, 1e-6))
        << item.key() << " in step " << step;
    ASSERT_EQ(item.value().grad().defined(), whole.grad().defined()) << item.key();
    if (whole.grad().defined()) {
      EXPECT_TRUE(torch::allclose(item.value().grad(), shard(whole.grad()), 1e-4, 1e-6))
          << "gradient of " << item.key() << " in step " << step;
    }
  }
}

void shard_net(Net& net, const ReshardAfterForward& reshard_after_forward = {}) {
  for (auto& block : net->blocks) {
    fully_shard(block, {.reshard_after_forward = reshard_after_forward});
  }
  fully_shard(net, {.reshard_after_forward = reshard_after_forward});
}

/// Trains both, calling `step_loss(net, step, rank)` and backward on each rank.
void train_and_compare(Net& net, int steps = 5) {
  const int n = get_world_size();
  auto reference = make_net();
  torch::optim::AdamW sharded_optimizer(net->parameters(), 1e-2);
  torch::optim::AdamW optimizer(reference->parameters(), 1e-2);
  for (int step = 0; step < steps; ++step) {
    auto loss = loss_of(net, step, get_rank());
    loss.backward();
    torch::Tensor total = torch::zeros({});
    for (int rank = 0; rank < n; ++rank) {
      const auto theirs = loss_of(reference, step, rank);
      if (rank == get_rank()) {
        EXPECT_TRUE(torch::allclose(loss, theirs, 1e-5, 1e-6));
      }
      total = total + theirs / n;
    }
    total.backward();
    expect_equal(net, reference, step);
    sharded_optimizer.step();
    optimizer.step();
    sharded_optimizer.zero_grad();
    optimizer.zero_grad();
    expect_equal(net, reference, step);
  }
}

using Case = std::tuple<int, std::optional<bool>>;
class FullyShard : public testing::TestWithParam<Case> {};

TEST_P(FullyShard, TrainsLikeTheUnshardedModel) {
  const auto [world_size, reshard] = GetParam();
  run_ranks(world_size, [&, reshard = reshard](int) {
    auto net = make_net();
    shard_net(net, reshard ? ReshardAfterForward(*reshard) : ReshardAfterForward());
    train_and_compare(net);
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    FullyShard,
    testing::Combine(
        testing::Values(1, 2, 3, 4),
        testing::Values(std::optional<bool>(), std::optional(true), std::optional(false))),
    [](const auto& info) {
      const auto reshard = std::get<1>(info.param);
      return std::to_string(std::get<0>(info.param)) + (!reshard   ? "auto"
                                                        : *reshard ? "true"
                                                                   : "false");
    });

TEST(FullyShard, WorksWithAnOptimizerThatWasThereBefore) {
  run_ranks(2, [](int) {
    auto net = make_net();
    auto reference = make_net();
    torch::optim::SGD sharded_optimizer(net->parameters(), 1e-1);
    torch::optim::SGD optimizer(reference->parameters(), 1e-1);
    shard_net(net);
    for (int step = 0; step < 3; ++step) {
      loss_of(net, step, 0).backward(); // the same batch on both ranks
      loss_of(reference, step, 0).backward();
      sharded_optimizer.step();
      optimizer.step();
      sharded_optimizer.zero_grad();
      optimizer.zero_grad();
      expect_equal(net, reference, step);
    }
  });
}

TEST(FullyShard, AccumulatesGradientsWithoutCommunication) {
  run_ranks(2, [](int rank) {
    auto net = make_net();
    auto reference = make_net();
    shard_net(net);
    for (int microbatch = 0; microbatch < 3; ++microbatch) {
      FSDPModule::of(net).set_requires_gradient_sync(microbatch == 2);
      loss_of(net, microbatch, rank).backward();
      ((loss_of(reference, microbatch, 0) + loss_of(reference, microbatch, 1)) / 2).backward();
    }
    expect_equal(net, reference, 0);
  });
}

TEST(FullyShard, SeveralForwardsBeforeOneBackward) {
  run_ranks(2, [](int) {
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE_OF(reshard);
      auto net = make_net();
      auto reference = make_net();
      shard_net(net, reshard);
      (loss_of(net, 0, 0) + loss_of(net, 1, 0)).backward();
      (loss_of(reference, 0, 0) + loss_of(reference, 1, 0)).backward();
      expect_equal(net, reference, 0);
    }
  });
}

TEST(FullyShard, EvaluationBetweenBackwardAndStepChangesNothing) {
  run_ranks(2, [](int) {
    auto net = make_net();
    auto reference = make_net();
    shard_net(net);
    torch::optim::SGD sharded_optimizer(net->parameters(), 1e-1);
    torch::optim::SGD optimizer(reference->parameters(), 1e-1);
    for (int step = 0; step < 2; ++step) {
      loss_of(net, step, 0).backward();
      loss_of(reference, step, 0).backward();
      {
        torch::NoGradGuard no_grad;
        EXPECT_TRUE(torch::allclose(loss_of(net, 9, 0), loss_of(reference, 9, 0), 1e-5, 1e-6));
      }
      sharded_optimizer.step();
      optimizer.step();
      expect_equal(net, reference, step);
    }
    c10::InferenceMode inference;
    EXPECT_TRUE(torch::allclose(loss_of(net, 9, 0), loss_of(reference, 9, 0), 1e-5, 1e-6));
  });
}

TEST(FullyShard, AnExceptionInForwardLeavesNothingBehind) {
  run_ranks(2, [](int) {
    auto net = make_net();
    shard_net(net);
    net->blocks[1]->fail = true;
    EXPECT_THROW(loss_of(net, 0, 0), c10::Error);
    net->blocks[1]->fail = false;
    train_and_compare(net, 2);
  });
}

TEST(FullyShard, AnExceptionInBackwardLeavesNothingBehind) {
  run_ranks(2, [](int) {
    auto net = make_net();
    shard_net(net);
    auto x = net->blocks[0](batch(0, 0).set_requires_grad(true));
    EXPECT_TRUE(x.requires_grad());
    auto again = make_net();
    shard_net(again);
    auto input = batch(0, 0).set_requires_grad(true);
    input.register_hook(
        [](const torch::Tensor&) -> torch::Tensor { TORCH_CHECK(false, "as asked"); });
    EXPECT_THROW(again(input).sum().backward(), c10::Error);
    for (const auto& param : again->parameters()) {
      param.mutable_grad() = torch::Tensor(); // what had been reduced by then
    }
    train_and_compare(again, 2);
  });
}

TEST(FullyShard, FrozenAndIgnoredParametersAreLeftAlone) {
  run_ranks(2, [](int) {
    auto net = make_net();
    net->blocks[0]->up->weight.set_requires_grad(false);
    for (auto& block : net->blocks) {
      fully_shard(block);
    }
    fully_shard(net, {.ignored_params = {net->head->bias}});
    EXPECT_EQ(net->head->bias.size(0), 3);
    loss_of(net, 0, 0).backward();
    EXPECT_FALSE(net->blocks[0]->up->weight.grad().defined());
    EXPECT_EQ(net->head->bias.grad().size(0), 3);
    net->blocks[0]->up->weight.set_requires_grad(true); // unfrozen later
    loss_of(net, 1, 0).backward();
    EXPECT_TRUE(net->blocks[0]->up->weight.grad().defined());
  });
}

TEST(FullyShard, AModuleThatReturnsItsWeightIsRefused) {
  struct LeakyImpl : torch::nn::Module {
    LeakyImpl() : weight(register_parameter("weight", torch::ones({4, 2}))) {}
    torch::Tensor forward(torch::Tensor) {
      return weight.t();
    }
    torch::Tensor weight;
  };
  run_ranks(2, [](int) {
    Holder<LeakyImpl> leaky;
    leaky = Holder<LeakyImpl>(std::make_shared<Hooked<LeakyImpl>>());
    fully_shard(leaky);
    EXPECT_TRUE(contains(
        message_of<c10::Error>([&] { leaky(torch::ones({1})); }),
        "returns its parameter 'weight'"));
  });
}

TEST(FullyShard, RefusesWithNames) {
  run_ranks(2, [](int) {
    auto net = make_net();
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { fully_shard(net->head); }), "LinearImpl is not hooked"));
    EXPECT_TRUE(
        contains(message_of<c10::ValueError>([&] { FSDPModule::of(net); }), "is not sharded"));
    fully_shard(net);
    EXPECT_TRUE(is_fsdp_module(net));
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { fully_shard(net); }),
        "can only be applied to a module once"));
    EXPECT_TRUE(
        contains(message_of<c10::Error>([&] { net->clone(); }), "does not support deepcopy"));
  });
}

} // namespace
} // namespace fsdp
