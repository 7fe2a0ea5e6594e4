#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/export.h>

namespace fsdp {

/// What an extension may want to know of its parameter.
struct AllGatherInfo {
  std::string name;
  DeviceMesh mesh;            // the ranks that are gathered
  std::vector<int64_t> sizes; // of the whole parameter, contiguous
  int64_t shard_dim = 0;
  at::ScalarType param_dtype; // of the unsharded parameter
};

/// What one rank sends of a parameter: any number of tensors of any dtype,
/// with the same sizes on every rank and in every step.
struct AllGatherPayload {
  std::vector<at::Tensor> tensors;
  std::any metadata = {}; // kept on this rank, for post_all_gather
};

/// Sends a parameter in another form than its bytes: fp8 or int8 with scales,
/// for example. Both functions run without gradients.
struct FSDP_API AllGatherExtension {
  virtual ~AllGatherExtension() = default;

  /// `shard` is this rank's, padded with zeros to the size of the longest.
  virtual AllGatherPayload pre_all_gather(const at::Tensor& shard, const AllGatherInfo& info) = 0;

  /// `outputs[i]` holds the ranks' payload tensors i one after another along
  /// dim 0 (a scalar counts as one row). Fills `out`, the whole parameter.
  virtual void post_all_gather(
      const std::vector<at::Tensor>& outputs,
      const std::any& metadata,
      const AllGatherInfo& info,
      at::Tensor& out) = 0;
};

/// From the next unshard on, `param`, which is sharded, is gathered by
/// `extension`; null takes it away. Every rank must make the same call.
FSDP_API void set_all_gather_extension(
    const at::Tensor& param, std::shared_ptr<AllGatherExtension> extension);

} // namespace fsdp
