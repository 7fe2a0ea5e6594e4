#pragma once

#include <string>
#include <vector>

#include "process_group/collective_call.h"
#include "runtime/stream.h"

namespace fsdp::detail {

/// One rank's call of a collective among threads, and on a device the stream that
/// the rank was on.
struct ThreadCall {
  explicit ThreadCall(CollectiveCall call);

  CollectiveCall call;
  OptionalStream stream; // empty on the CPU
  StreamEvent ready;     // from here on this rank's tensors may be used
  StreamEvent done;      // this rank's part has been computed
};

/// The work of one collective among threads, cut into one part per rank. Part
/// r writes rank r's output (all-reduce: slice r of every rank's tensor). So the
/// parts are independent, and any thread may compute any part.
class ThreadOperation {
 public:
  /// `calls[r]` is the call of rank r.
  explicit ThreadOperation(std::vector<ThreadCall> calls) : calls_(std::move(calls)) {}

  /// Returns "" if the calls fit together, else a text that lists every rank's call.
  /// The text names the ranks by `world_ranks`.
  static std::string mismatch(
      const std::vector<ThreadCall>& calls, const std::vector<int>& world_ranks);

  /// Computes part `rank`; on a device, enqueues it on that rank's stream.
  void run_part(int rank);

  /// Called after all parts. Makes the stream of `rank` wait for all parts, which read or write the
  /// rank's tensors. Then the rank may reuse or free its tensors.
  void order_after_parts(int rank);

  /// Called after all parts. Drops the references to the tensors.
  void release();

 private:
  void compute(int rank);

  std::vector<ThreadCall> calls_;
};

} // namespace fsdp::detail
