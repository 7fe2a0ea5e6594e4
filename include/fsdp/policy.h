#pragma once

#include <c10/core/ScalarType.h>

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/export.h>
#include <fsdp/placement.h>

namespace fsdp {

/// What happens to the parameters between forward and backward: true frees
/// them and gathers them again, false keeps them, and k divides them over
/// groups of k neighbouring ranks, which gather among themselves. Automatic
/// (nullopt) is true, except for the root, whose backward begins at once.
class ReshardAfterForward {
 public:
  ReshardAfterForward() = default;
  ReshardAfterForward(std::nullopt_t) {} // NOLINT
  template <std::integral T>
  ReshardAfterForward(T value) // NOLINT
      : kind_(std::same_as<T, bool> ? (value ? Kind::Yes : Kind::No) : Kind::Ranks),
        ranks_(static_cast<int64_t>(value)) {}

  bool is_auto() const {
    return kind_ == Kind::Auto;
  }
  bool is_number() const {
    return kind_ == Kind::Ranks;
  }
  /// Over how many of a group's `size` ranks the parameters are divided after
  /// forward; 0 keeps them whole. Throws ValueError unless a number divides
  /// `size`.
  FSDP_API int ranks(int size) const;

 private:
  enum class Kind : std::uint8_t { Auto, Yes, No, Ranks };
  Kind kind_ = Kind::Auto;
  int64_t ranks_ = 0;
};

/// In which dtypes a module computes and communicates. Shards, gradients after
/// their reduction and optimizer state keep the parameters' own dtype; buffers
/// are left alone.
struct MixedPrecisionPolicy {
  /// Of gathered parameters, and so of compute; by default their own.
  std::optional<c10::ScalarType> param_dtype = {};
  /// In which gradients are accumulated and reduced; by default as computed.
  std::optional<c10::ScalarType> reduce_dtype = {};
  /// Floating point outputs of forward are cast to it.
  std::optional<c10::ScalarType> output_dtype = {};
  /// Cast floating point inputs of forward to `param_dtype`.
  bool cast_forward_inputs = true;
};

/// Shards stay on the device.
struct OffloadPolicy {};
/// Shards, their gradients and so the optimizer state are in host memory;
/// gathered parameters are on the device.
struct CPUOffloadPolicy {
  /// Page-locked, so that copies run beside compute; ignored without an
  /// accelerator.
  bool pin_memory = true;
};
using AnyOffloadPolicy = std::variant<OffloadPolicy, CPUOffloadPolicy>;

/// Which axes of a mesh are those of data parallelism, by name; several of a kind
/// count as one. Parameters are replicated over the axes of `replicate`.
struct DataParallelMeshDims {
  std::vector<std::string> shard = {};
  std::vector<std::string> replicate = {};
};

/// Along which dim a parameter is sharded, and over which mesh: by default
/// that of the call. A Shard converts to it.
struct ShardPlacement {
  int64_t dim = 0;
  std::optional<DeviceMesh> mesh = {};
};

inline Shard::operator ShardPlacement() const {
  return {.dim = dim};
}

} // namespace fsdp
