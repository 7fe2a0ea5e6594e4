#include "param/spread.h"

#include <c10/util/Exception.h>

#include <utility>

#include "mesh/mesh_layout.h"
#include "param/tensor_table.h"
#include "tensor/shard_layout.h"

namespace fsdp::detail {

namespace {

TensorTable<Spread*> spreads;

} // namespace

Spread::Spread(at::Tensor param, std::string name, TensorSpec spec)
    : param_(std::move(param)), name_(std::move(name)), spec_(std::move(spec)) {
  const bool is_new = spreads.add(param_, this);
  TORCH_INTERNAL_ASSERT(is_new, "parameter '", name_, "' is a piece already");
}

Spread::~Spread() {
  spreads.remove(param_);
}

std::shared_ptr<Spread> Spread::find(const at::Tensor& tensor) {
  return spreads.with(tensor, [](Spread* const* spread) {
    return spread ? (*spread)->weak_from_this().lock() : nullptr;
  });
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
