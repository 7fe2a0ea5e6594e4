#include "param/spread.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "mesh/mesh_layout.h"
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

std::vector<std::vector<int64_t>> Spread::piece_sizes() const {
  std::vector<std::vector<int64_t>> sizes;
  for (int64_t i = 0; i < spec_.mesh.size(); ++i) {
    sizes.push_back(local_sizes(
        spec_.sizes, spec_.placements, spec_.mesh.shape(), grid_coordinate(spec_.mesh.shape(), i)));
  }
  return sizes;
}

at::Tensor Spread::piece_of(const at::Tensor& whole) const {
  const std::vector<Placement> replicated(spec_.placements.size(), Replicate{});
  return redistribute(whole, {spec_.mesh, replicated, spec_.sizes}, spec_.placements);
}

} // namespace fsdp::detail
