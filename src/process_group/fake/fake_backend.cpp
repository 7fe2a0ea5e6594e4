#include "process_group/fake/fake_backend.h"

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

bool fits_wide_elements(const at::Tensor& rows) {
  constexpr size_t kWide = 16;
  return rows.size(1) * rows.element_size() % kWide == 0 &&
         rows.storage_offset() * rows.element_size() % kWide == 0 &&
         reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kWide == 0;
}

/// Returns a view of `flat` from `offset` on: `times` rows of `numel` elements. With a stride of 0
/// all rows are the same memory.
at::Tensor as_rows(
    const at::Tensor& flat, int64_t offset, int64_t times, int64_t numel, int64_t stride) {
  return flat.as_strided({times, numel}, {stride, 1}, flat.storage_offset() + offset);
}

/// Copies `numel` elements of `in` to `out`, `times` times one behind the other.
void repeat(
    const at::Tensor& out,
    int64_t out_offset,
    const at::Tensor& in,
    int64_t in_offset,
    int64_t numel,
    int64_t times) {
  if (numel == 0) {
    return;
  }
  auto to = as_rows(out, out_offset, times, numel, numel);
  auto from = as_rows(in, in_offset, times, numel, 0);
  if (!in.is_cpu() && fits_wide_elements(from) && fits_wide_elements(to)) {
    // A GPU copies the same bytes fastest as the widest elements, those of 16 bytes.
    from = from.view(at::kComplexDouble);
    to = to.view(at::kComplexDouble);
  }
  to.copy_(from);
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
      if (!call.plan) {
        repeat(out.view(-1), 0, in.view(-1), 0, in.numel(), size);
      } else if (in.is_cpu()) {
        place_repeated(out, in, *call.plan);
      } else {
        for (const auto& part : call.plan->parts) {
          repeat(out, part.out, in, part.in, part.numel, size);
        }
      }
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
