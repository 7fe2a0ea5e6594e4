#include "process_group/agreement.h"

#include <ATen/ATen.h>

#include <bit>
#include <limits>

#include "base/check.h"
#include "base/text.h"
#include "launch/launch_env.h"
#include "process_group/c10d_adapter.h"

namespace fsdp::detail {

namespace {

constexpr uint64_t kFirstCalls = 64;

uint64_t num_checked_calls() {
  static const auto number = [] {
    const auto asked = process_env("FSDP_CHECK_COLLECTIVES").value_or("first");
    FSDP_CHECK_AS(
        ConfigError, asked == "first" || asked == "all" || asked == "none",
        "FSDP_CHECK_COLLECTIVES is '", asked, "', not one of first, all, none");
    return asked == "all"    ? std::numeric_limits<uint64_t>::max()
           : asked == "none" ? 0
                             : kFirstCalls;
  }();
  return number;
}

/// The properties of a call that must be the same on every rank.
std::vector<int64_t> fingerprint(const CollectiveCall& call) {
  const bool has_output = call.output.defined();
  const bool split = !call.out_splits.empty() || !call.in_splits.empty();
  return {
      static_cast<int64_t>(call.kind),
      has_output ? static_cast<int64_t>(call.output.scalar_type()) : -1,
      has_output && !split ? call.output.numel() : -1,
      static_cast<int64_t>(call.op.kind()),
      std::bit_cast<int64_t>(call.op.factor()),
      call.root};
}

std::string describe(const int64_t* print) {
  const auto kind = static_cast<CollectiveKind>(print[0]);
  auto text = std::string(to_string(kind));
  if (print[1] >= 0) {
    text += c10::str("(", static_cast<at::ScalarType>(print[1]));
    if (print[2] >= 0) {
      text += c10::str(", ", print[2], " elements of output");
    }
    if (kind == CollectiveKind::AllReduce || kind == CollectiveKind::ReduceScatter) {
      text += c10::str(", reduction ", print[3], " by ", std::bit_cast<double>(print[4]));
    }
    if (kind == CollectiveKind::Broadcast || kind == CollectiveKind::Scatter) {
      text += c10::str(", root ", print[5]);
    }
    text += ")";
  }
  return text;
}

} // namespace

void check_agreement(GroupState& group, const CollectiveCall& call) {
  auto& backend = *group.backend;
  if (backend.getSize() == 1 || dynamic_cast<const LocalBackend*>(&backend) ||
      backend.getBackendName() == "nccl" || (call.output.defined() && !call.output.is_cpu())) {
    return;
  }
  if (group.num_calls++ >= num_checked_calls()) {
    return;
  }
  // Under MetaInit a tensor without a named device would be a meta tensor.
  const auto options = at::device(at::kCPU).dtype(at::kLong);
  const auto mine = at::tensor(fingerprint(call), options);
  auto all = at::empty({backend.getSize(), mine.numel()}, options);
  issue(backend, {.kind = CollectiveKind::AllGather, .output = all, .input = mine})->wait();
  if (all.equal(mine.expand_as(all))) {
    return;
  }
  std::vector<std::string> brought;
  for (int64_t rank = 0; rank < backend.getSize(); ++rank) {
    brought.push_back(
        c10::str("rank ", group.world_ranks[rank], ": ", describe(all[rank].data_ptr<int64_t>())));
  }
  FSDP_THROW(
      CommError, "in group '", group.name,
      "' the ranks brought different calls: ", join(brought, "; "));
}

} // namespace fsdp::detail
