#pragma once

#include <ATen/ATen.h>
#include <fsdp/extension.h>

/// Sends a parameter as int8, with one float scale per block of rows of a shard:
/// a quarter of the bytes of float, half of those of bf16. Values arrive with an
/// error of at most half a scale. A block of zeros or padding arrives as zeros, a
/// block with a NaN or an infinity as NaNs. Shards, gradients and optimizer state
/// stay as they are.
class Int8Gather : public fsdp::AllGatherExtension {
 public:
  explicit Int8Gather(int64_t rows_per_scale = 16) : rows_per_scale_(rows_per_scale) {
    TORCH_CHECK_VALUE(rows_per_scale > 0, "rows_per_scale is ", rows_per_scale);
  }

  fsdp::AllGatherPayload pre_all_gather(
      const at::Tensor& shard, const fsdp::AllGatherInfo& /*info*/) override {
    const auto rows = by_rows(shard).to(at::kFloat);
    const auto num_rows = rows.size(0);
    const auto num_blocks = (num_rows + rows_per_scale_ - 1) / rows_per_scale_;
    const auto largest = at::constant_pad_nd(
        rows.abs().amax(/*dim=*/1), {0, num_blocks * rows_per_scale_ - num_rows});
    const auto scales = largest.view({num_blocks, rows_per_scale_}).amax(/*dim=*/1) / 127;
    const auto scale =
        scales.repeat_interleave(rows_per_scale_).narrow(0, 0, num_rows).view({-1, 1});
    // Clamped, because rounding a scale near zero can make a quotient larger than 127.
    const auto packed = (rows / scale.masked_fill(scale == 0, 1)).round().clamp(-127, 127);
    return {{packed.to(at::kChar).view(shard.sizes()), scales}};
  }

  void post_all_gather(
      const std::vector<at::Tensor>& outputs,
      const std::any& /*metadata*/,
      const fsdp::AllGatherInfo& info,
      at::Tensor& out) override {
    const auto& packed = outputs[0];
    const auto num_ranks = info.mesh.size();
    const auto scale = outputs[1]
                           .view({num_ranks, outputs[1].size(0) / num_ranks})
                           .repeat_interleave(rows_per_scale_, /*dim=*/1)
                           .narrow(1, 0, packed.size(0) / num_ranks)
                           .reshape({-1, 1});
    const auto values = (by_rows(packed) * scale).view(packed.sizes());
    // copy_ casts to info.param_dtype. narrow leaves out the padding of the last ranks.
    out.copy_(
        info.shard_dim == 0 ? values.narrow(0, 0, info.sizes[0])
                            : at::cat(values.chunk(num_ranks), info.shard_dim));
  }

 private:
  static at::Tensor by_rows(const at::Tensor& tensor) {
    return tensor.dim() == 1 ? tensor.unsqueeze(1) : tensor.flatten(1);
  }

  const int64_t rows_per_scale_;
};
