#pragma once

#include <fsdp/forward_scope.h>
#include <fsdp/tensor_parallel.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace fsdp::detail {

inline constexpr const char* kParallelizeTag = "[parallelize_module] "; // begins its messages

/// A module that a plan names, by its name below the one that was given.
struct StyledModule {
  std::string name;
  torch::nn::Module* module;
  DeviceMesh mesh;

  /// "'layers.0.attention' (AttentionImpl)": for messages.
  std::string text() const;
};

/// What a style makes of one of the module's parameters.
struct ParamDivision {
  std::string name; // below the module that was given
  at::Tensor param;
  Placement placement;
  bool sum_grads = false; // every rank computes a term of them
};

/// Throws where the style does not fit the module, or is none.
std::vector<ParamDivision> param_divisions(const StyledModule& at, const ParallelStyle& style);

/// What the style does around forward; after the parameters have been divided.
std::vector<ForwardHook> forward_hooks(const StyledModule& at, const ParallelStyle& style);

/// Whether a style does something to parameters, or only prepares inputs and
/// outputs. Of the first kind a module has one at most.
bool divides(const ParallelStyle& style);
/// Which of "input" and "output" it moves, as one that only prepares.
std::vector<const char*> prepared_sides(const ParallelStyle& style);

} // namespace fsdp::detail
