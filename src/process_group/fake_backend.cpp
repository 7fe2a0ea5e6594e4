#include "process_group/fake_backend.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "process_group/gather_plan.h"

namespace fsdp::detail {

namespace {

class DoneWork : public c10d::Work {
 public:
  DoneWork() {
    completed_ = true;
  }
  bool wait(std::chrono::milliseconds) override {
    return true;
  }
};

bool fits_wide_elements(const at::Tensor& flat) {
  constexpr size_t kWide = 16;
  return flat.nbytes() % kWide == 0 && flat.storage_offset() * flat.element_size() % kWide == 0 &&
         reinterpret_cast<uintptr_t>(flat.const_data_ptr()) % kWide == 0;
}

void repeat(at::Tensor out, at::Tensor in, int64_t times) {
  if (!in.is_cpu() && fits_wide_elements(in) && fits_wide_elements(out)) {
    // The same bytes in the largest elements there are, which a GPU copies fastest.
    in = in.view(at::kComplexDouble);
    out = out.view(at::kComplexDouble);
  }
  out.view({times, in.numel()}).copy_(in.expand({times, in.numel()}));
}

void premultiply(at::Tensor& tensor, const ReduceOp& op) {
  if (op.kind() == ReduceOp::PremulSum) {
    tensor.mul_(op.factor());
  }
}

} // namespace

c10::intrusive_ptr<c10d::Work> FakeBackend::issue_call(CollectiveCall call) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto& out = call.output;
  const auto& in = call.input;
  const int64_t size = getSize();
  switch (call.kind) {
    case CollectiveKind::AllGather:
      if (call.plan) {
        place_repeated(out, in, *call.plan);
        break;
      }
      repeat(out.view(-1), in.view(-1), size);
      break;
    case CollectiveKind::ReduceScatter:
      out.view(-1).copy_(in.view({size, out.numel()}).select(0, getRank()));
      premultiply(out, call.op);
      break;
    case CollectiveKind::AllReduce:
      premultiply(out, call.op);
      break;
    case CollectiveKind::Scatter:
      if (in.defined()) {
        out.view(-1).copy_(in.view({size, out.numel()}).select(0, getRank()));
      }
      break;
    case CollectiveKind::AllToAll: {
      const auto numel = std::min(out.numel(), in.numel());
      out.view(-1).narrow(0, 0, numel).copy_(in.view(-1).narrow(0, 0, numel));
      break;
    }
    case CollectiveKind::Broadcast:
    case CollectiveKind::Barrier:
      break;
  }
  return c10::make_intrusive<DoneWork>();
}

c10::intrusive_ptr<c10d::Backend> FakeFactory::make(
    const std::string&, const std::vector<int>& world_ranks, int rank) {
  return c10::make_intrusive<FakeBackend>(rank, static_cast<int>(world_ranks.size()));
}

} // namespace fsdp::detail
