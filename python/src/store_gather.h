#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::python {

/// Gathers small tensors of the CPU through a store. Over gloo the ranks compare their calls in
/// this way: if the calls differ, a collective of the group would meet one of another size, for
/// which gloo ends the process.
///
/// A store ends with the process that has it, which may be the first to have done its work. Each
/// rank then gathers its own tensor from all ranks, so that nothing is compared.
class StoreGather : public c10d::Backend {
 public:
  struct Group {
    std::string name;
    std::vector<int> world_ranks;
    std::chrono::milliseconds timeout;
  };
  /// All ranks of the group make one at a time. `store` should be a client that no other thread
  /// waits with.
  StoreGather(c10::intrusive_ptr<c10d::Store> store, int rank, Group group);

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override;

 private:
  class Gathering;

  const c10::intrusive_ptr<c10d::Store> store_;
  const Group group_;
  std::string prefix_;
  int64_t number_ = 0; // of gathers so far
};

} // namespace fsdp::python
