#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include <fsdp/state_dict.h>

#include "checkpoint/catalog.h"
#include "layout/box.h"

namespace fsdp::detail {

/// A box of a tensor that this rank writes.
struct Part {
  std::string name;
  Box box;
  at::Tensor data; // elements of the box, on any device, contiguous or not
};

/// The contents of a save, and the parts of them that this rank writes.
struct SavePlan {
  Catalog catalog; // all tensors of all ranks, without pieces, and the values that this rank writes
  std::vector<Part> parts;
};

/// A tensor of a state dict on this rank: its local part, and the boxes of the whole tensor that
/// make up this part.
struct LocalTensor {
  at::Tensor local;
  std::vector<int64_t> sizes; // of the whole tensor
  std::vector<LocalBox> boxes;
};
/// Returns nothing if the value is not a tensor.
std::optional<LocalTensor> local_tensor(const StateDict::Value& value);

// Note [Who writes what]
//
// Each part of a tensor is written by one rank. Several ranks may hold the same part: ranks along
// replicated mesh axes, ranks in other slices of a mesh, or all ranks for a plain tensor. They
// divide the tensors among them: each rank writes tensors that are neighbours in the state dict,
// and about the same number of bytes. For example, the first of two ranks writes the first half.
// Each placement is divided separately, because its parts are held by different sets of ranks.
//
// The ranks may have different keys. The stages of a pipeline do, and a full state dict is empty
// except on rank 0. So the ranks compare checksums of their lists of keys. They exchange the lists
// only if the checksums differ.

/// A rank's message to the others before a save.
struct PlanRequest {
  std::string list;         // JSON: its keys, with dtype, shape and placement
  std::string mesh_indices; // JSON: its index in each mesh, in the order of their first use

  /// Equal on ranks that have the same list.
  std::string checksum() const;
};

/// Throws CheckpointError if a tensor cannot be saved.
PlanRequest make_request(const StateDict& state);

/// `lists` are the lists of all ranks, or a single list if all are equal. `mesh_indices` are
/// those of all ranks.
SavePlan make_plan(
    const StateDict& state,
    int rank,
    const std::vector<std::string>& lists,
    const std::vector<std::string>& mesh_indices);

} // namespace fsdp::detail
