// A group describes itself: to the log, to a sharding plan and to memory_stats.
#include "group/param_group.h"
#include "runtime/log.h"

namespace fsdp::detail {

void FSDPParamGroup::log_layout() const {
  if (flat_.ranks().rank() != 0) {
    return; // the other ranks would log the same
  }
  const auto& reduce_dtype = reducer_->reduce_dtype();
  log(LogLevel::Info, c10::str(
                          "group=\"", name_, "\" ranks=", size(), " ", flat_.describe(),
                          " reduce_dtype=", reduce_dtype ? c10::toString(*reduce_dtype) : "same",
                          " reshard_after_forward=", ranks_after_forward_));
}

ShardingPlan::Group FSDPParamGroup::plan() const {
  auto plan = flat_.plan();
  if (!flat_.alone()) {
    plan.all_gathers = 1;
    plan.all_gather_bytes = plan.gathered_bytes;
    if (ranks_after_forward_ > 0) { // backward gathers what forward has freed
      ++plan.all_gathers;
      plan.all_gather_bytes +=
          ranks_after_forward_ == size() ? plan.gathered_bytes : flat_.neighbour_gather_bytes();
    }
  }
  reducer_->add_to(plan);
  return plan;
}

std::vector<ProcessGroup> FSDPParamGroup::process_groups() const {
  std::vector<ProcessGroup> groups{flat_.ranks()};
  if (replicas_) {
    groups.push_back(*replicas_);
  }
  return groups;
}

void FSDPParamGroup::visit_memory(const MemoryVisitor& visit) const {
  flat_.visit_memory(visit); // first, because the shard may be the input of a gather
  const auto visit_gather = [&](const PendingGather& gathered) {
    visit(&MemoryStats::communication, gathered.input);
    visit(&MemoryStats::communication, gathered.buffer);
  };
  if (gather_) {
    visit_gather(*gather_);
    for (const auto& sent : gather_->payloads) {
      for (const auto& tensor : sent.payload.tensors) {
        visit(&MemoryStats::communication, tensor);
      }
    }
  }
  if (const auto* parked = comm->parked()) {
    visit_gather(*parked);
  }
  for (const auto& each : comm->retired()) {
    visit(&MemoryStats::gathered, each.memory);
  }
  const auto& queue = comm->reductions;
  visit(&MemoryStats::communication, comm->spare_memory.kept());
  for (const auto* reductions : {&queue.reduce_scatters(), &queue.all_reduces()}) {
    for (const auto& reduction : *reductions) {
      if (reduction.reducer.lock() == reducer_) {
        visit(&MemoryStats::communication, reduction.reducing.input);
        visit(&MemoryStats::communication, reduction.reducing.output);
      }
    }
  }
}

} // namespace fsdp::detail
