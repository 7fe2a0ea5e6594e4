#include "param/tensor_piece.h"

#include <c10/util/Exception.h>

#include <utility>

#include "layout/mesh_layout.h"
#include "layout/shard_layout.h"
#include "param/tensor_table.h"

namespace fsdp::detail {

namespace {

TensorTable<TensorPiece*> pieces;

} // namespace

TensorPiece::TensorPiece(at::Tensor param, std::string name, TensorSpec spec)
    : param_(std::move(param)), name_(std::move(name)), spec_(std::move(spec)) {
  const bool is_new = pieces.add(param_, this);
  TORCH_INTERNAL_ASSERT(is_new, "parameter '", name_, "' is a piece already");
}

TensorPiece::~TensorPiece() {
  pieces.remove(param_);
}

std::shared_ptr<TensorPiece> TensorPiece::find(const at::Tensor& tensor) {
  return pieces.with(tensor, [](TensorPiece* const* piece) {
    return piece ? (*piece)->weak_from_this().lock() : nullptr;
  });
}

std::vector<std::vector<int64_t>> TensorPiece::piece_sizes() const {
  std::vector<std::vector<int64_t>> sizes;
  for (int64_t i = 0; i < spec_.mesh.size(); ++i) {
    sizes.push_back(local_sizes(
        spec_.sizes, spec_.placements, spec_.mesh.shape(), grid_coordinate(spec_.mesh.shape(), i)));
  }
  return sizes;
}

at::Tensor TensorPiece::piece_of(const at::Tensor& whole) const {
  const std::vector<Placement> replicated(spec_.placements.size(), Replicate{});
  return redistribute(whole, {spec_.mesh, replicated, spec_.sizes}, spec_.placements);
}

} // namespace fsdp::detail
