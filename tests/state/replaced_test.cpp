// Data and members of parameters that are replaced after fully_shard.
#include "state/mixed_net.h"

namespace fsdp {
namespace {

using namespace test;

// ------------------------------------------------------------ Data

void expect_double(Stack& net, Stack& reference) {
  reference->to(torch::kDouble);
  for (const auto& param : net->parameters()) {
    EXPECT_EQ(param.scalar_type(), torch::kDouble);
  }
  net->zero_grad();
  train_and_compare(
      net, reference,
      [](Stack& each, int step) {
        return each(random_batch(step, {2, 6}).to(torch::kDouble)).sum();
      },
      2);
}

TEST(ReplacedData, ModuleToWhileParametersAreWhole) {
  for (const int n : {1, 2}) {
    run_ranks(n, [](int) {
      auto [net, reference] = twins<Stack>(6);
      fully_shard(net->mlps[0]);
      auto root = fully_shard(net);
      net(random_batch(0, {2, 6})); // the root keeps its parameters, and no backward comes
      net->to(torch::kDouble);
      root.reshard();
      expect_double(net, reference);

      auto [other, expected] = twins<Stack>(6);
      auto handle = fully_shard(other);
      handle.unshard();
      other->to(torch::kDouble);
      handle.reshard();
      expect_double(other, expected);

      auto third = seeded<Stack>(6);
      expected = seeded<Stack>(6);
      auto gather = fully_shard(third).unshard(/*async_op=*/true);
      third->to(torch::kDouble);
      gather->wait();
      gather->wait(); // does nothing
      FSDPModule::of(third).reshard();
      expect_double(third, expected);
    });
  }
}

TEST(ReplacedData, ConversionBetweenForwardAndBackwardThrows) {
  run_ranks(4, [](int) {
    for (const ReshardAfterForward& reshard : {ReshardAfterForward(true), ReshardAfterForward(2)}) {
      SCOPED_TRACE_OF(reshard);
      auto net = seeded<Stack>(6);
      fully_shard(net, {.reshard_after_forward = reshard});
      auto loss = net(random_batch(0, {2, 6})).sum();
      net->to(torch::kDouble);
      EXPECT_TRUE(contains(
          message_of<c10::Error>([&] { loss.backward(); }),
          "between its forward and its backward"));
    }
  });
}

TEST(ReplacedData, DataAssignedBetweenMicrobatches) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(6);
    auto root = fully_shard(net, {.reshard_after_forward = false});
    root.set_is_last_backward(false);
    root.set_reshard_after_backward(false);
    net(random_batch(0, {2, 6})).sum().backward(); // memory is kept
    const auto fresh = torch::randn({24, 6}, generator(3)).to(test_device());
    auto& weight = net->in_proj->weight;
    weight.set_data(part_of(fresh, weight).clone());
    net(random_batch(0, {2, 6}));
    EXPECT_SAME(weight.detach(), fresh);
    root.reshard();
  });
}

TEST(ReplacedData, DataAssignedUnderAGatherThatIsThenResharded) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(6);
    auto root = fully_shard(net);
    (void)root.unshard(/*async_op=*/true);
    const auto fresh = torch::randn({24, 6}, generator(3)).to(test_device());
    auto& weight = net->in_proj->weight;
    weight.set_data(part_of(fresh, weight).clone());
    root.reshard(); // adopts it; the gather is of the old one
    root.unshard();
    EXPECT_SAME(weight.detach(), fresh);
    root.reshard();
  });
}

TEST(ReplacedData, WritesThroughADTensorCountAsASteps) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(6);
    fully_shard(net, {.reshard_after_forward = true});
    auto loss = net(random_batch(0, {2, 6})).sum();
    as_dtensor(net->in_proj->weight).to_local().add_(1);
    EXPECT_THROW(loss.backward(), c10::Error);
  });
}

// ------------------------------------------------------------ Members

TEST(ReplacedMembers, AreFoundByTheNextForwards) {
  for (const bool late : {false, true}) {
    run_ranks(2, [&](int) {
      SCOPED_TRACE_OF(late);
      auto [net, reference] = twins<Mixed>();
      fully_shard(net->inner);
      fully_shard(net);
      if (late) {
        train_and_compare(net, reference, mixed_loss, 5);
      }
      const auto expect_found = [&](const std::string& param) {
        std::string message;
        for (int step = 0; step < 8 && message.empty(); ++step) {
          try {
            mixed_loss(net, step).backward();
          } catch (const c10::Error& error) {
            message = error.what_without_backtrace();
          }
        }
        EXPECT_TRUE(contains(message, "does not use its parameter '" + param + "'"));
        EXPECT_TRUE(contains(message, "replaced after fully_shard"));
      };
      const auto weight = net->head->weight;
      net->head->weight = torch::ones({5, 6}, test_device()).set_requires_grad(true);
      expect_found("head.weight");
      net->head->weight = weight;
      if (!late) {
        net->head = linear(6, 5);
        to_test_device(*net->head);
        expect_found("head.weight");
      }
    });
  }
}

TEST(ReplacedMembers, UnusedParametersAndInputsAreNotMeant) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<DoubleLinear>(6, /*use_second_linear=*/false);
    fully_shard(net);
    // Of the sizes of a weight.
    auto outside = torch::ones({6, 6}, test_device()).set_requires_grad(true);
    for (int step = 0; step < 4; ++step) {
      net(outside * 2).front().sum().backward();
      net(outside).front().sum().backward();
    }
    EXPECT_TRUE(outside.grad().defined());
  });
}

} // namespace
} // namespace fsdp
