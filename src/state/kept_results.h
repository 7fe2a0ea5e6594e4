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

// Note [Selective recomputation]
//
// A recomputed call with a SavePolicy keeps the results of some operators. When backward makes
// the call again, autograd records these operators as in the first call, with the same saved
// tensors, but their kernels do not run: the results of the first time take their place. This is
// how Python's create_selective_checkpoint_contexts works. Unlike there, the policy is asked in
// the first call only. The second call finds a result by the operator and the number of the call.
//
// Only operators that autograd records are counted: both calls make the same of these, or backward
// would fail anyway. Others may run in the first call only, to fill a cache.
//
// A result that is written to is of no use: in the second call the same write would come on top.
// Each entry watches the versions of its tensors, and of tensors that share their memory but not
// their version, such as those of aten::_unsafe_view, which is a part of every matmul.

/// Calls `visit(tensor)` for each defined tensor, also for those in lists.
template <class Visit>
void for_each_tensor(c10::ArrayRef<c10::IValue> values, const Visit& visit) {
  for (const auto& value : values) {
    if (value.isTensor() && value.toTensor().defined()) {
      visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& each : value.toTensorVector()) {
        if (each.defined()) {
          visit(each);
        }
      }
    }
  }
}

/// Returns true if results of the operator can take the place of another run of it: it does not
/// consist of other operators, writes to no argument, returns no view, does not choose a device
/// (its calls are not seen below autograd) and does not always draw random numbers.
bool can_keep_results(const c10::OperatorHandle& op);

/// The results that one recomputed call keeps. Must outlive its interceptors.
class KeptResults {
 public:
  explicit KeptResults(std::shared_ptr<SavePolicy> policy) : policy_(std::move(policy)) {}
  ~KeptResults();
  KeptResults(const KeptResults&) = delete;
  KeptResults& operator=(const KeptResults&) = delete;

  /// Keeps the results that the policy wants while the interceptor lives: during the first call.
  /// The interceptor's destructor drops results that were written to.
  std::unique_ptr<OpInterceptor> keep();
  /// Gives back the kept results while the interceptor lives: during a repeated call. Forgets each
  /// result at once, unless it will be needed `once_more`.
  std::unique_ptr<OpInterceptor> reuse(bool once_more);

 private:
  class Interceptor;
  class Keep;
  class Reuse;

  /// A tensor, and its version when it was made.
  struct Watched {
    at::Tensor tensor;
    uint32_t version = 0;
  };
  /// The results of one call of an operator. Empty if they are not kept.
  struct Entry {
    std::vector<c10::IValue> results;
    std::vector<Watched> watched;
    int64_t bytes = 0;

    bool can_be_used() const;
  };

  void release(Entry& entry);

  const std::shared_ptr<SavePolicy> policy_;
  std::unordered_map<c10::OperatorName, std::deque<Entry>> entries_;
  /// The entry that owns each memory. Filled only during the first call.
  std::unordered_map<const c10::StorageImpl*, Entry*> by_memory_;
};

} // namespace fsdp::detail
