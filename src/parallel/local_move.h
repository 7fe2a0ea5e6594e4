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

/// Whose tensor is moved: for messages.
struct MoveLabel {
  std::string what;        // "[redistribute] the tensor", "[...] input 0 of 'attention'"
  std::string module = {}; // "attention", or nothing
};

/// `sizes` are those of the whole tensor, where they are known.
at::Tensor move_local(
    const at::Tensor& local,
    const LocalMove& move,
    const MoveLabel& label,
    const std::optional<std::vector<int64_t>>& sizes = std::nullopt);

// Note [Inputs that several modules share]
//
// wq(x), wk(x), wv(x): their gradients of x are to be summed over the ranks. So
// the last input that was handed on is remembered, weakly, with its node in the
// graph, and gradients are added up there before one reduction. Where x itself was
// gathered as the input of the module around them, they bypass it: one
// reduce-scatter, where they would have been all-reduced first, and cut to pieces
// then. An x that has to be gathered for each of the three is gathered three
// times: PrepareModuleInput of the module around them does it once.

/// The same for a module's input.
at::Tensor move_input(const at::Tensor& local, const LocalMove& move, const MoveLabel& label);

/// Takes note that `mesh` divides tensors along `dim`, of `length`, unevenly, if
/// so: then a part's length does not say any more how long the whole is.
void note_division(const DeviceMesh& mesh, int64_t dim, int64_t length);

/// Whether activations can be placed so: not strided, sums only.
bool can_move(const Placement& placement);

/// "mesh axis 'tp' of DeviceMesh(cpu, tp=2)": for messages. Of one axis.
std::string axis_text(const DeviceMesh& mesh);

} // namespace fsdp::detail
