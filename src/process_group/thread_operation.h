#pragma once

#include <string>
#include <vector>

#include "process_group/collective_call.h"
#include "runtime/stream.h"

namespace fsdp::detail {

/// One rank's contribution to a collective among threads, with its place in
/// device time: the stream the rank was on, and when its tensors were ready.
struct ThreadCall {
  explicit ThreadCall(CollectiveCall call);

  CollectiveCall call;
  OptionalStream stream; // none on the CPU
  StreamEvent ready;     // this rank's tensors may be used
  StreamEvent done;      // this rank's part has been computed
};

/// The work of one collective among threads, cut into one part per rank. Part
/// r writes rank r's output (all-reduce: slice r of every rank's tensor), so
/// parts are independent, and any thread may compute any of them.
class ThreadOperation {
 public:
  /// `calls[r]` is what rank r brought.
  explicit ThreadOperation(std::vector<ThreadCall> calls) : calls_(std::move(calls)) {}

  /// "" when the calls fit together, else what each rank brought.
  /// `world_ranks` names them.
  static std::string mismatch(
      const std::vector<ThreadCall>& calls, const std::vector<int>& world_ranks);

  /// Computes part `rank`; on a device, enqueues it on that rank's stream.
  void run_part(int rank);

  /// After all parts: orders rank `rank`'s stream behind every peer that read
  /// or wrote its tensors, so that it may reuse or free them.
  void order_after_parts(int rank);

  /// After all parts: lets go of the tensors.
  void release();

 private:
  void compute(int rank);

  std::vector<ThreadCall> calls_;
};

} // namespace fsdp::detail
