// How many events a group and step takes: they are most of what ordering streams costs the host.
#include "runtime/event_pool.h"
#include "support/gpu.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

/// Of one step of so many groups, when the pool is full.
detail::EventOperations step_events(int64_t groups) {
  auto net = seeded<Stack>(16, groups);
  const auto mesh = init_device_mesh(torch::kCUDA, {get_world_size()});
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, {.mesh = mesh, .reshard_after_forward = true});
  }
  fully_shard(net, {.mesh = mesh, .reshard_after_forward = true});
  const auto step = [&] {
    net(torch::ones({4, 16}, torch::kCUDA)).sum().backward();
    net->zero_grad();
  };
  step();
  step();
  const auto before = detail::event_operations;
  step();
  const auto after = detail::event_operations;
  return {
      .made = after.made - before.made,
      .records = after.records - before.records,
      .waits = after.waits - before.waits};
}

TEST(EventsOnGpu, PerGroupAndStep) {
  SKIP_WITHOUT_GPU();
  run_ranks(2, [](int) {
    const auto few = step_events(2);
    const auto many = step_events(6);
    // Of both ranks: whoever waits computes any rank's part of a collective.
    const auto more =
        torch::tensor({many.records - few.records, many.waits - few.waits}, torch::kLong);
    default_group().all_reduce(more);
    // ====================================================================================
    // The numbers. A gather, twice: copy-in before gather, gather issued, copied out (3
    // records); gather after copy-in, compute after gather, copy-in after copy-out (3
    // waits). A reduction: after compute, and compute after it (2 of each). In each of the
    // three collectives, the thread's tensors are ready, its part is done, and its work is
    // queued (3 records); it waits for both ranks twice, and for its work (5 waits).
    EXPECT_EQ(more[0].item<int64_t>(), 2 * 4 * (8 + 3 * 3));
    EXPECT_EQ(more[1].item<int64_t>(), 2 * 4 * (8 + 3 * 5));
    EXPECT_LE(many.made, 4); // nearly all have been used before; the ranks share a pool
    // ====================================================================================
  });
}

} // namespace
} // namespace fsdp
