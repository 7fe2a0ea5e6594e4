// Handles and logs that outlive their modules.
#include <fsdp/call.h>
#include <fsdp/debug.h>

#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

TEST(Handles, HandlesThatOutliveTheirModules) {
  run_ranks(2, [](int) {
    auto handle = [] {
      torch::nn::Linear foreign(4, 4);
      return fully_shard(by_call(foreign));
    }();
    EXPECT_THROW(handle.set_requires_gradient_sync(true), c10::Error);
    Linear kept = linear(4, 4);
    auto pair = [&] {
      Linear gone = linear(4, 4);
      return fully_shard({kept, gone});
    }();
    pair.set_requires_gradient_sync(true);
    torch::nn::LinearImpl on_stack(4, 4);
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { fully_shard(by_call(on_stack)); }),
        "that a holder or a shared_ptr owns"));
    EXPECT_EQ(on_stack.weight.size(0), 4);
  });
}

TEST(Handles, LogsThatEndInAnyOrder) {
  run_ranks(1, [](int) {
    auto net = seeded<MLP>(4);
    fully_shard(net);
    auto first = std::make_unique<EventLog>();
    auto second = std::make_unique<EventLog>();
    auto counts = std::make_unique<CommDebugMode>();
    CommDebugMode inner;
    first.reset();
    counts.reset();
    net(random_batch(0, {2, 4}));
    EXPECT_EQ(second->events().size(), 1u);
    second.reset();
    net(random_batch(0, {2, 4}));
  });
}

} // namespace
} // namespace fsdp
