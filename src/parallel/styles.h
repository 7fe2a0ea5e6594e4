#pragma once

#include <fsdp/detail/forward_scope.h>
#include <fsdp/tensor_parallel.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace fsdp::detail {

inline constexpr const char* kParallelizeTag = "[parallelize_module] "; // begins messages

/// A module that a plan names. `name` is relative to the module given to parallelize_module.
struct StyledModule {
  std::string name;
  torch::nn::Module* module;
  DeviceMesh mesh;

  /// Text for messages: "'layers.0.attention' (AttentionImpl)".
  std::string text() const;
};

/// Says how a style divides one of the module's parameters over the mesh.
struct ParamDivision {
  std::string name; // relative to the module given to parallelize_module
  at::Tensor param;
  Placement placement;
  bool sum_grads = false; // each rank computes one term of the gradient
};

/// Returns the placements of the module's parameters. Throws if the style does not fit the module.
std::vector<ParamDivision> param_divisions(const StyledModule& at, const ParallelStyle& style);

/// Returns the hooks that the style runs around forward. The parameters must be divided before.
std::vector<ForwardHook> forward_hooks(const StyledModule& at, const ParallelStyle& style);

/// Returns true if the style divides parameters, false if it only prepares inputs and outputs. A
/// module can have at most one style that divides parameters.
bool divides(const ParallelStyle& style);
/// Returns which of "input" and "output" the style prepares. Empty for a style that divides
/// parameters.
std::vector<const char*> prepared_sides(const ParallelStyle& style);

} // namespace fsdp::detail
