#pragma once

#include <fsdp/debug.h>

#include <functional>
#include <string>

#include "support/sharded.h"

namespace fsdp::test {

/// Trains a stack whose biases alone need gradients, frozen before or after it is
/// sharded; `prepare` is given each MLP first.
inline void train_biases_only(
    const ReshardAfterForward& reshard,
    bool freeze_after,
    const std::function<void(MLP&)>& prepare = [](MLP&) {}) {
  SCOPED_TRACE_OF(reshard, freeze_after);
  auto [net, reference] = twins<Stack>(32);
  const auto freeze = [](Stack& each) {
    for (const auto& item : each->named_parameters()) {
      item.value().set_requires_grad(item.key().find("bias") != std::string::npos);
    }
  };
  freeze(reference);
  if (!freeze_after) {
    freeze(net);
  }
  for (auto& mlp : net->mlps) {
    prepare(mlp);
    fully_shard(mlp, {.reshard_after_forward = reshard});
  }
  fully_shard(net, {.reshard_after_forward = reshard});
  freeze(net);
  CommDebugMode comm;
  train_and_compare(
      net, reference,
      [&](Stack& each, int step) {
        comm.clear();
        return each(random_batch(step, {2, 32})).sum();
      },
      3);
  EXPECT_EQ(comm.count("reduce_scatter"), 3);
  EXPECT_EQ(comm.bytes("reduce_scatter"), 3 * 4 * (128 + 32));
  // During backward, not at its end: that goes the other way round.
  EventLog log;
  net(random_batch(0, {2, 32})).sum().backward();
  std::string order;
  for (const auto& event : log.events()) {
    order += event.kind == EventLog::Kind::PostBackward ? event.module : "";
  }
  EXPECT_EQ(order, "210");
}

} // namespace fsdp::test
