#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/export.h>

namespace fsdp {

/// The properties of a parameter that its extension gets.
struct AllGatherInfo {
  std::string name;
  DeviceMesh mesh;            // the ranks that the gather covers
  std::vector<int64_t> sizes; // of the whole parameter, which is contiguous
  int64_t shard_dim = 0;
  at::ScalarType param_dtype; // of the gathered parameter
};

/// The tensors that a rank sends for a parameter: any number, of any dtypes. Their sizes must be
/// the same on every rank and in every step.
struct AllGatherPayload {
  std::vector<at::Tensor> tensors;
  std::any metadata = {}; // stays on this rank; post_all_gather gets it
};

/// Sends a parameter in another form than its own bytes, for example as fp8 or int8 with scales.
/// Both functions run without grad mode.
struct FSDP_API AllGatherExtension {
  virtual ~AllGatherExtension() = default;

  /// Makes what this rank sends. `shard` is this rank's shard, padded with zeros to the size of
  /// the largest shard.
  virtual AllGatherPayload pre_all_gather(const at::Tensor& shard, const AllGatherInfo& info) = 0;

  /// Fills `out`, the whole parameter. `outputs[i]` holds the i-th payload tensor of every rank,
  /// one after another along dim 0. A 0-dim payload tensor counts as one row.
  virtual void post_all_gather(
      const std::vector<at::Tensor>& outputs,
      const std::any& metadata,
      const AllGatherInfo& info,
      at::Tensor& out) = 0;
};

/// From the next unshard on, gathers the sharded parameter `param` with `extension`. Null removes
/// the extension. Every rank must make the same call.
FSDP_API void set_all_gather_extension(
    const at::Tensor& param, std::shared_ptr<AllGatherExtension> extension);

} // namespace fsdp
