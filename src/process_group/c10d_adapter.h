#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>

#include "process_group/collective_call.h"

namespace fsdp::detail {

// c10d renames its collective functions between versions, so only this file and
// its .cpp name them. Calls to any backend go through `issue`. Our own backends
// derive from `LocalBackend`, which turns c10d's calls back into CollectiveCall
// records.

/// Starts `call` on `backend`. The backend must support the reduction `call.op`.
c10::intrusive_ptr<c10d::Work> issue(c10d::Backend& backend, const CollectiveCall& call);

/// Returns true if the backend itself computes Avg and PremulSum. For other
/// backends the caller uses Sum and multiplies before it or divides after it.
bool scales_natively(const c10d::Backend& backend);

/// The base of our own backends, which implement one function instead of c10d's twenty.
class LocalBackend : public c10d::Backend {
 public:
  LocalBackend(int rank, int size, std::string name)
      : Backend(rank, size), name_(std::move(name)) {}

  /// Starts `call`, which has passed `check_call`.
  virtual c10::intrusive_ptr<c10d::Work> issue_call(CollectiveCall call) = 0;

  /// Returns true if an all-gather with a GatherPlan needs only one launch per part on a GPU.
  virtual bool places_on_devices() const {
    return false;
  }

  const std::string getBackendName() const override {
    return name_;
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& out_splits,
      std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

 private:
  c10::intrusive_ptr<c10d::Work> start(CollectiveCall call);

  const std::string name_;
};

} // namespace fsdp::detail
