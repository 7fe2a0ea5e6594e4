#pragma once

#include <c10/core/ScalarType.h>

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <fsdp/device_budget.h>
#include <fsdp/device_mesh.h>
#include <fsdp/export.h>
#include <fsdp/placement.h>

namespace fsdp {

/// Chooses what happens to the parameters between forward and backward. True frees them after
/// forward and gathers them again for backward. False keeps them. A number k keeps them divided
/// over k neighbouring ranks, which gather among themselves for backward. The default (nullopt) is
/// true, except for the root: it keeps its parameters, because its backward begins right after its
/// forward.
class ReshardAfterForward {
 public:
  ReshardAfterForward() = default;
  // NOLINTBEGIN(google-explicit-constructor): an option is written as its value
  ReshardAfterForward(std::nullopt_t) {}
  template <std::integral T>
  ReshardAfterForward(T value)
      : kind_(std::same_as<T, bool> ? (value ? Kind::Yes : Kind::No) : Kind::Ranks),
        ranks_(static_cast<int64_t>(value)) {}
  // NOLINTEND(google-explicit-constructor)

  bool is_auto() const {
    return kind_ == Kind::Auto;
  }
  bool is_number() const {
    return kind_ == Kind::Ranks;
  }
  /// Returns over how many of a group's `size` ranks the parameters are divided after forward; 0
  /// keeps them whole. Throws ValueError if a number was given that does not divide `size`.
  FSDP_API int ranks(int size) const;

 private:
  enum class Kind : std::uint8_t { Auto, Yes, No, Ranks };
  Kind kind_ = Kind::Auto;
  int64_t ranks_ = 0;
};

/// The dtypes in which a module computes and communicates. Shards, reduced gradients and
/// optimizer state keep the parameters' own dtype. Buffers are not changed.
struct MixedPrecisionPolicy {
  /// The dtype of gathered parameters, and so of compute. By default the parameters' own.
  std::optional<c10::ScalarType> param_dtype = {};
  /// The dtype in which gradients are accumulated and reduced. By default the one they are
  /// computed in.
  std::optional<c10::ScalarType> reduce_dtype = {};
  /// Floating point outputs of forward are cast to this dtype. By default they are not cast.
  std::optional<c10::ScalarType> output_dtype = {};
  /// Whether floating point inputs of forward are cast to `param_dtype`.
  bool cast_forward_inputs = true;
};

/// Shards stay on the device. This is the default.
struct OffloadPolicy {};
/// Shards and their gradients, and so the optimizer state, are in host memory. Gathered
/// parameters are on the device.
struct CPUOffloadPolicy {
  /// Use page-locked memory, so that copies overlap with compute. Has no effect without an
  /// accelerator.
  bool pin_memory = true;
  /// Groups stay on the device as long as they fit into this budget; later ones that do not are
  /// offloaded. Make one policy and give it to all calls for a model. Shard the layers in the order
  /// of forward: the first ones, whose gradients come last, should stay on the device. Without a
  /// budget all groups are offloaded.
  std::optional<DeviceBudget> budget = {};
};
using AnyOffloadPolicy = std::variant<OffloadPolicy, CPUOffloadPolicy>;

/// The names of the mesh axes that are for data parallelism. Parameters are sharded over the axes
/// in `shard` and replicated over those in `replicate`. Several axes in one list count as one
/// axis.
struct DataParallelMeshDims {
  std::vector<std::string> shard = {};
  std::vector<std::string> replicate = {};
};

/// The dim along which to shard a parameter, and the mesh to shard it over. By default that is the
/// mesh of the fully_shard call. A Shard and a BlockShard convert to a ShardPlacement.
struct ShardPlacement {
  int64_t dim = 0;
  std::optional<DeviceMesh> mesh = {};
  int64_t merged_dims = 1; // if more, the first dims are divided as one, see BlockShard
};

inline Shard::operator ShardPlacement() const {
  return {.dim = dim};
}

inline BlockShard::operator ShardPlacement() const {
  return {.merged_dims = dims};
}

} // namespace fsdp
