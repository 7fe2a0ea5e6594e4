#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/placement.h>

namespace fsdp::detail {

/// A move of local tensors over a mesh of one axis; see fsdp::redistribute.
struct LocalMove {
  DeviceMesh mesh;
  Placement from, to;
  std::optional<Placement> grad = {};
};

/// Names the moved tensor in messages.
struct MoveLabel {
  std::string what;        // "[redistribute] the tensor", "[...] input 0 of 'attention'"
  std::string module = {}; // "attention", or ""
};

/// Moves `local` and returns the result. `sizes` are those of the whole tensor, if known.
at::Tensor move_local(
    const at::Tensor& local,
    const LocalMove& move,
    const MoveLabel& label,
    const std::optional<std::vector<int64_t>>& sizes = std::nullopt);

// Note [Inputs that several modules share]
//
// wq(x), wk(x) and wv(x) each compute a gradient of x that has to be summed over the ranks. So the
// last input is remembered, weakly, together with its autograd node. The gradients of x are added
// up at this node, and one reduction follows. If x itself was gathered as the input of the
// enclosing module, the gradients bypass that gather's node: one reduce-scatter takes the place of
// an all-reduce and a slice. If each of the three modules has to gather x, x is gathered three
// times. PrepareModuleInput of the enclosing module gathers it once.

/// Does the same for an input of a module.
at::Tensor move_input(const at::Tensor& local, const LocalMove& move, const MoveLabel& label);

/// Records that `mesh` divides tensors unevenly along `dim`, if `length` is not a multiple of the
/// mesh's size. From then on, the length of a rank's part does not tell the length of the whole.
void record_uneven_division(const DeviceMesh& mesh, int64_t dim, int64_t length);

/// Returns true if activations can have this placement: no StridedShard, and only sums as Partial.
bool can_move(const Placement& placement);

/// Text for messages: "mesh axis 'tp' of DeviceMesh(cpu, tp=2)". `mesh` has one axis.
std::string axis_text(const DeviceMesh& mesh);

} // namespace fsdp::detail
