#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <string>

namespace fsdp::python {

/// Gathers small tensors through a store. Over gloo the ranks compare their calls in this way: if
/// the calls differ, a collective of the group would meet one of another size, for which gloo ends
/// the process.
class StoreGather : public c10d::Backend {
 public:
  /// All ranks of a group make one at a time. `store` is that of the group.
  StoreGather(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  int64_t number_ = 0; // of gathers so far
};

} // namespace fsdp::python
