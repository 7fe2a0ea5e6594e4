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

// A style says how a module's parameters are divided over the ranks of a mesh axis, and how its
// inputs and outputs are placed there. Names and defaults are those of
// torch.distributed.tensor.parallel. One thing differs: no activation is a DTensor, and a module
// always computes with its rank's part. Code that uses whole sizes, such as the number of heads,
// must use the local sizes instead. `use_local_output` and `use_local_input` have no effect, and
// exist only so that plans can be copied from Python.

/// Divides the output features of a Linear, or the embedding dim of an Embedding. Every rank
/// computes its features from the whole input.
struct ColwiseParallel {
  Placement input_layouts = Replicate{};
  Placement output_layouts = Shard{-1};
  bool use_local_output = true;
};

/// Divides the input features of a Linear, or the rows of an Embedding (its vocabulary). Every
/// rank computes a term of the whole output. The bias of a Linear is replicated. An Embedding
/// usually gets the same tokens on every rank: give it `.input_layouts = Replicate{}`.
struct RowwiseParallel {
  Placement input_layouts = Shard{-1};
  Placement output_layouts = Replicate{};
  bool use_local_output = true;
};

/// Each rank runs the module, for example a norm, on its part of the sequence. The parameters are
/// replicated, and their gradients are summed over the ranks.
struct SequenceParallel {
  int64_t sequence_dim = 1;
  bool use_local_output = false;
};

/// The placements of the tensors in a module's arguments (or in its result), in their order.
/// nullopt leaves a tensor as it is.
class Layouts {
 public:
  Layouts() = default;
  template <std::convertible_to<Placement> P>
  // NOLINTNEXTLINE(google-explicit-constructor): a single placement is a list of one
  Layouts(P placement) : each_{Placement(placement)} {}
  Layouts(std::initializer_list<std::optional<Placement>> each) : each_(each) {}

  const std::vector<std::optional<Placement>>& each() const {
    return each_;
  }

 private:
  std::vector<std::optional<Placement>> each_;
};

/// Moves a module's inputs from `input_layouts`, the placements that they have, to
/// `desired_input_layouts`.
struct PrepareModuleInput {
  Layouts input_layouts = {};
  Layouts desired_input_layouts = {};
  bool use_local_output = false;
};

/// Moves a module's outputs from `output_layouts`, the placements that they have, to
/// `desired_output_layouts`.
struct PrepareModuleOutput {
  Layouts output_layouts = {};
  Layouts desired_output_layouts = {};
  bool use_local_output = true;
};

/// PrepareModuleInput and PrepareModuleOutput in one style.
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

/// The styles of a model's modules, by name: {{"attention.wq", ColwiseParallel{}},
/// {"layers.*.norm", SequenceParallel{}}}. Each part of a name (between dots) may be a pattern
/// with *, ? and [abc]. "" is the module itself. A single style stands for {{"", style}}.
class ParallelPlan {
 public:
  using Entry = std::pair<std::string, ParallelStyle>;

  // NOLINTBEGIN(google-explicit-constructor): a style or a list of entries is a plan
  template <std::convertible_to<ParallelStyle> Style>
  ParallelPlan(Style style) : entries_{{"", ParallelStyle(std::move(style))}} {}
  ParallelPlan(std::initializer_list<Entry> entries) : entries_(entries) {}
  ParallelPlan(std::vector<Entry> entries) : entries_(std::move(entries)) {}
  // NOLINTEND(google-explicit-constructor)

  const std::vector<Entry>& entries() const {
    return entries_;
  }

 private:
  std::vector<Entry> entries_;
};

/// Applies tensor parallelism over a mesh of one axis. Each parameter stays the same tensor
/// object, but from now on holds this rank's piece of the values that the axis's first rank had;
/// as_dtensor describes the whole. Inputs and outputs are converted around each forward, so the
/// modules in the plan must be hooked (see FSDP_MODULE). Call it before fully_shard, which then
/// shards the pieces. Collective over the mesh.
FSDP_API void parallelize_module(
    ModuleRef module, const DeviceMesh& mesh, const ParallelPlan& plan);

/// Makes a parameter of a hooked module this rank's piece of itself, in place, and does nothing
/// else. For a module that computes with pieces by itself, such as experts, using
/// fsdp::redistribute. The mesh may have several axes. Call it before fully_shard. Collective
/// over the mesh.
FSDP_API void distribute_parameter(
    ModuleRef module,
    const std::string& name,
    const DeviceMesh& mesh,
    std::vector<Placement> placements);

/// Marks every parameter at and below a hooked module as replicated on `mesh`, except those that
/// are divided already, and gives it the values of the mesh's first rank. Use it for fully_shard
/// with `dp_mesh_dims`. Collective over the mesh.
FSDP_API void distribute_module(ModuleRef module, const DeviceMesh& mesh);

} // namespace fsdp
