#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fsdp/process_group.h>

#include "process_group/collective_call.h"
#include "runtime/stream.h"

namespace fsdp::detail {

// Note [Ranks that agree]
//
// If ranks call different collectives of equal size, each takes the other's data for its own, and
// nobody notices. If the sizes differ, gloo ends the process and NCCL hangs. So each call has a
// fingerprint: the kind, sizes, dtype and reduction, and for the engine's calls which module and
// which parameters they are for. The ranks of a group compare it:
//
//   threads   before anything is computed, each call (ThreadOperation)
//   gloo      before the call goes to gloo, each call, in a thread of the group (AgreedCalls)
//   others    nccl, backends of the user's own, and gloo under Python unless its store is a file:
//             all calls since the start, once per step (CallHistory). The error comes one or two
//             steps later, because a comparison at once would wait for the GPU.
//
// FSDP_CHECK_COLLECTIVES=none switches off all but the first.

/// Returns one number for all properties of a call that must be the same on every rank.
uint64_t fingerprint(const CollectiveCall& call);
/// Returns false if FSDP_CHECK_COLLECTIVES is "none".
bool checks_collectives();

/// False while the current stream is captured in a CUDA graph: the host must not wait then. A later
/// comparison has the captured calls, too.
bool can_compare_calls(c10::Device device);
/// Compares the calls of the groups that have a CallHistory. Collective over each of them.
void compare_calls(const std::vector<ProcessGroup>& groups, c10::Device device);

/// The members of a group whose calls are compared.
struct Members {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::string group;
  std::vector<int> world_ranks;
};

/// Passes calls on to the backend, in order, each as soon as every rank is known to make the same
/// one. A thread of its own does this, so the caller waits for nobody.
class AgreedCalls {
 public:
  explicit AgreedCalls(Members members);
  ~AgreedCalls();
  AgreedCalls(const AgreedCalls&) = delete;
  AgreedCalls& operator=(const AgreedCalls&) = delete;

  /// The Work throws CommError if the ranks made different calls. None of these takes place, and
  /// the next call is compared anew.
  c10::intrusive_ptr<c10d::Work> issue(CollectiveCall call);

 private:
  class Passed;
  struct Request {
    CollectiveCall call;
    c10::intrusive_ptr<Passed> work;
    bool in_inference_mode;
  };
  void run();
  void check(const CollectiveCall& call);

  const Members members_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> requests_;
  bool is_busy_ = false; // the thread has a request that has left the queue
  bool ends_ = false;
  std::thread thread_; // last, because it uses the others
};

/// All calls of a group whose ranks do not compare each of them. `compare` compares them later.
class CallHistory {
 public:
  explicit CallHistory(Members members) : members_(std::move(members)) {}

  void add(const CollectiveCall& call);
  /// Throws CommError if an earlier comparison shows that the ranks made different calls. Then
  /// starts a comparison of the calls so far, whose result a later `compare` looks at. Collective;
  /// `device` is that of the group's tensors.
  void compare(c10::Device device);

 private:
  struct Entry {
    uint64_t fingerprint;
    CollectiveKind kind;
    std::shared_ptr<const CollectivePurpose> purpose;
    std::string text; // of a call without a purpose
  };
  struct Comparison {
    uint64_t num_calls;
    at::Tensor mine; // keeps the memory until it was sent
    at::Tensor all;  // each rank's hash of its calls, on the host when `ready`
    c10::intrusive_ptr<c10d::Work> work;
    StreamEvent ready;
  };
  void finish(Comparison& comparison);
  [[noreturn]] void explain(c10::Device device);

  const Members members_;
  std::mutex mutex_; // several threads may call
  uint64_t hash_ = 0;
  uint64_t num_calls_ = 0;
  uint64_t num_compared_ = 0; // by the comparison that was started last
  std::deque<Entry> recent_;  // those that no comparison has found equal; not more than kRecent
  std::deque<Comparison> comparisons_;
};

} // namespace fsdp::detail
