#pragma once

#include <ATen/core/ivalue.h>
#include <fsdp/save_policy.h>

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/op_interceptor.h"

namespace fsdp::detail {

// Note [Selective activation checkpointing]
//
// A checkpointed call with a SavePolicy keeps the results of some operators. When backward makes
// the call again, autograd records these operators as in the first call, with the same saved
// tensors, but their kernels do not run: what they returned the first time takes their place. This
// is how Python's create_selective_checkpoint_contexts works. Unlike there, the policy is asked in
// the first call only. The second call finds the n-th call of an operator by its number n.

/// Returns true if results of the operator could take the place of another run of it: it does not
/// consist of other operators, writes to no argument and returns no view.
bool can_keep_results(const c10::OperatorHandle& op);

/// The results that one checkpointed call keeps. Must outlive its interceptors.
class KeptResults {
 public:
  explicit KeptResults(std::shared_ptr<SavePolicy> policy) : policy_(std::move(policy)) {}
  ~KeptResults();
  KeptResults(const KeptResults&) = delete;
  KeptResults& operator=(const KeptResults&) = delete;

  /// While it lives, in the first call: keeps what the policy wants.
  std::unique_ptr<OpInterceptor> keep();
  /// While it lives, in a repeated call: gives back what was kept. Forgets it at once, unless it
  /// will be needed `once_more`.
  std::unique_ptr<OpInterceptor> reuse(bool once_more);

 private:
  class Keep;
  class Reuse;

  /// The results of one call of an operator. Empty if they are not kept.
  struct Entry {
    std::vector<c10::IValue> results;
    std::vector<uint32_t> versions; // of the tensors among the results
    int64_t bytes = 0;
  };

  void release(Entry& entry);

  const std::shared_ptr<SavePolicy> policy_;
  std::unordered_map<c10::OperatorName, std::deque<Entry>> entries_;
};

} // namespace fsdp::detail
