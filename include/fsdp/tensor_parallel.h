#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/export.h>
#include <fsdp/module_ref.h>
#include <fsdp/placement.h>

namespace fsdp {

// Styles say how a module's parameters are divided over the ranks of a mesh
// axis, and how its inputs and outputs lie there. Names and defaults are those of
// torch.distributed.tensor.parallel. One thing differs: here no activation is a
// DTensor, modules always compute with their rank's part. Where code counts on
// whole sizes, such as the number of heads, it has to be told the local ones.
// `use_local_output` is there so that plans can be taken over; whatever it says,
// outputs are local, and uneven parts find together again.

/// Divides the output features of a Linear, or the embedding dim of an
/// Embedding. Every rank computes its features from the whole input.
struct ColwiseParallel {
  Placement input_layouts = Replicate{};
  Placement output_layouts = Shard{-1};
  bool use_local_output = true;
};

/// Divides the input features of a Linear, or the rows of an Embedding (its
/// vocabulary). Every rank computes a term of the whole output. A Linear's bias
/// is replicated. Tokens are usually the same on every rank: give an Embedding
/// `.input_layouts = Replicate{}`.
struct RowwiseParallel {
  Placement input_layouts = Shard{-1};
  Placement output_layouts = Replicate{};
  bool use_local_output = true;
};

/// Each rank runs the module, a norm for example, on its part of the sequence.
/// The parameters are replicated, their gradients summed over the ranks.
struct SequenceParallel {
  int64_t sequence_dim = 1;
  bool use_local_output = false;
};

/// One placement, or one for each tensor of the arguments (or result) in their
/// order; nullopt leaves that tensor alone.
class Layouts {
 public:
  Layouts() = default;
  template <std::convertible_to<Placement> P>
  Layouts(P placement) : each_{Placement(placement)} {} // NOLINT
  Layouts(std::initializer_list<std::optional<Placement>> each) : each_(each) {}

  const std::vector<std::optional<Placement>>& each() const {
    return each_;
  }

 private:
  std::vector<std::optional<Placement>> each_;
};

/// Moves a module's inputs from the layouts that they have to those that the
/// module wants.
struct PrepareModuleInput {
  Layouts input_layouts = {};
  Layouts desired_input_layouts = {};
  bool use_local_output = false;
};

/// The same of its outputs.
struct PrepareModuleOutput {
  Layouts output_layouts = {};
  Layouts desired_output_layouts = {};
  bool use_local_output = true;
};

struct PrepareModuleInputOutput {
  Layouts input_layouts = {};
  Layouts desired_input_layouts = {};
  bool use_local_input = false;
  Layouts output_layouts = {};
  Layouts desired_output_layouts = {};
  bool use_local_output = true;
};

using ParallelStyle = std::variant<
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    PrepareModuleInputOutput>;

/// Which style for which module, by name: {{"attention.wq", ColwiseParallel{}},
/// {"layers.*.norm", SequenceParallel{}}}. A name's parts may be patterns (* ?
/// [abc]), each for one part; "" is the module itself, as is a style alone.
class ParallelPlan {
 public:
  using Entry = std::pair<std::string, ParallelStyle>;

  template <std::convertible_to<ParallelStyle> Style>
  ParallelPlan(Style style) : entries_{{"", ParallelStyle(std::move(style))}} {} // NOLINT
  ParallelPlan(std::initializer_list<Entry> entries) : entries_(entries) {}
  ParallelPlan(std::vector<Entry> entries) : entries_(std::move(entries)) {} // NOLINT

  const std::vector<Entry>& entries() const {
    return entries_;
  }

 private:
  std::vector<Entry> entries_;
};

/// Tensor parallelism over a mesh of one axis. Parameters stay the tensors that
/// they are and hold this rank's piece from here on, of the values that the
/// axis's first rank has; as_dtensor says what they are pieces of. Inputs and
/// outputs are converted around each forward, so the modules of the plan must be
/// hooked. Before fully_shard, which then shards the pieces. Collective.
FSDP_API void parallelize_module(
    ModuleRef module, const DeviceMesh& mesh, const ParallelPlan& plan);

/// Makes a parameter of a hooked module this rank's piece of itself, in place,
/// and nothing else: for a module that knows how to compute with pieces, such as
/// experts, by fsdp::redistribute. The mesh may have several axes. Before
/// fully_shard. Collective over the mesh.
FSDP_API void distribute_parameter(
    ModuleRef module,
    const std::string& name,
    const DeviceMesh& mesh,
    std::vector<Placement> placements);

/// Says of every parameter at and below a hooked module that has no place yet
/// that it is the same on all ranks of `mesh`, and makes it so: the values of the
/// first rank. For fully_shard with dp_mesh_dims. Collective over the mesh.
FSDP_API void distribute_module(ModuleRef module, const DeviceMesh& mesh);

} // namespace fsdp
