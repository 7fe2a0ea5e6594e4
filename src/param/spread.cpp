#include "param/spread.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "tensor/shard_layout.h"

namespace fsdp::detail {

namespace {

// Ranks may be threads, so one table for all of them.
std::mutex table_mutex;
std::unordered_map<const at::TensorImpl*, Spread*> table;

} // namespace

Spread::Spread(at::Tensor param, std::string name, TensorSpec spec)
    : param_(std::move(param)), name_(std::move(name)), spec_(std::move(spec)) {
  std::lock_guard lock(table_mutex);
  const bool is_new = table.emplace(param_.unsafeGetTensorImpl(), this).second;
  TORCH_INTERNAL_ASSERT(is_new, "parameter '", name_, "' is a piece already");
}

Spread::~Spread() {
  std::lock_guard lock(table_mutex);
  table.erase(param_.unsafeGetTensorImpl());
}

std::shared_ptr<Spread> Spread::find(const at::Tensor& tensor) {
  std::lock_guard lock(table_mutex);
  const auto found = table.find(tensor.unsafeGetTensorImpl());
  return found == table.end() ? nullptr : found->second->weak_from_this().lock();
}

TensorSpec Spread::divided_again(const DeviceMesh& mesh, std::vector<Placement> placements) const {
  for (auto& placement : placements) {
    const auto dim = shard_dim(placement);
    int64_t divided = 1;
    for (size_t axis = 0; axis < spec_.placements.size(); ++axis) {
      if (dim >= 0 && shard_dim(spec_.placements[axis]) == dim) {
        divided *= spec_.mesh.shape()[axis];
      }
    }
    if (divided > 1) {
      placement = StridedShard{dim, divided};
    }
  }
  placements.insert(placements.end(), spec_.placements.begin(), spec_.placements.end());
  return {concatenate(mesh, spec_.mesh), std::move(placements), spec_.sizes};
}

at::Tensor Spread::piece_of(const at::Tensor& whole) const {
  const std::vector<Placement> replicated(spec_.placements.size(), Replicate{});
  return redistribute(whole, {spec_.mesh, replicated, spec_.sizes}, spec_.placements);
}

} // namespace fsdp::detail
