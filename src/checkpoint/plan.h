#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include <fsdp/state_dict.h>

#include "checkpoint/box.h"
#include "checkpoint/catalog.h"

namespace fsdp::detail {

/// A box of a tensor that this rank writes.
struct Part {
  std::string name;
  Box box;
  at::Tensor data; // of the box; on any device, contiguous or not
};

/// What is saved, and this rank's share of it.
struct SavePlan {
  Catalog catalog; // all tensors of all ranks, without pieces, and all values
  std::vector<Part> parts;
};

/// A tensor of a state dict on this rank: its local part, and which boxes of the
/// whole that is.
struct LocalTensor {
  at::Tensor local;
  std::vector<int64_t> sizes; // of the whole
  std::vector<LocalBox> boxes;
};
/// Null for a value that is no tensor.
std::optional<LocalTensor> local_tensor(const StateDict::Value& value);

// Note [Who writes what]
//
// Each part of each tensor is written by one rank. Those that hold the same part
// of it (along replicated mesh axes, in other slices of a mesh, or all ranks for
// a plain tensor) share these tensors in their order, each as many bytes: the first
// of two ranks the first half. Counted for tensors of each placement on their own, as
// others have other ranks to share them.
//
// The ranks may bring different keys: a pipeline's stages do, each rank's random
// state is a key of its own, and full state dicts are empty but on rank 0. What
// each has is compared by a checksum; only where these differ the lists are
// exchanged.

/// What a rank tells the others before a save.
struct PlanRequest {
  std::string list;   // its keys, with dtype, shape and placement: JSON
  std::string places; // its place in each mesh, in the order of their first use: JSON

  /// Equal on ranks that bring the same keys in the same form.
  std::string checksum() const;
};

/// Throws CheckpointError where a tensor cannot be saved.
PlanRequest make_request(const StateDict& state);

/// `lists` are those of all ranks, or a single one if all are equal; `places` those
/// of all ranks.
SavePlan make_plan(
    const StateDict& state,
    int rank,
    const std::vector<std::string>& lists,
    const std::vector<std::string>& places);

} // namespace fsdp::detail
