#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <optional>

#include <fsdp/export.h>
#include <fsdp/extension.h>
#include <fsdp/hooked.h>

namespace fsdp {

// Linear layers that multiply in float8. They need a GPU of compute capability 8.9 or higher; on
// other GPUs torch throws. The CPU rounds to float8 in the same way and multiplies in fp32, so that
// a run can be tried there.
//
// Every tensor is divided by its scales before it is rounded, so that its largest value is just in
// range. All scales are powers of two. So a value that was rounded once is not rounded again under
// another scale, unless it is less than 1/16000 of the largest. A weight that was gathered in
// float8 gives the results of one that was gathered whole, except for such values.

/// Which values share a scale.
enum class Float8Scaling {
  /// All values of a tensor. This is faster. Gradients of results are e5m2, which has a wider
  /// range.
  tensorwise,
  /// The values in a row of the left matrix of a product, or in a column of the right one. Large
  /// values in one row do not take precision from the others. All values are e4m3. GPUs round the
  /// results to bf16.
  rowwise
};

/// Returns x W^T + b, as torch::linear does. The three products of forward and backward take their
/// matrices in float8; their results have the dtype of `x`, which must be that of `weight`. On a
/// GPU both sizes of the weight must be multiples of 16. There is no gradient of the gradient.
/// Activation checkpointing computes the products again, whatever its policy keeps.
FSDP_API at::Tensor float8_linear(
    const at::Tensor& x,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias = {},
    Float8Scaling scaling = Float8Scaling::tensorwise);

/// Gathers a parameter of two dims or more in float8, with scales: a quarter of the bytes of fp32,
/// half of those of bf16. With `tensorwise` each rank's part has one scale, with `rowwise` each row
/// of it. Shards, gradients and optimizer state stay as they are. See set_all_gather_extension.
FSDP_API std::shared_ptr<AllGatherExtension> float8_all_gather(
    Float8Scaling scaling = Float8Scaling::tensorwise);

namespace nn {

/// A Linear that computes with float8_linear.
class FSDP_API Float8LinearImpl : public torch::nn::LinearImpl {
 public:
  Float8LinearImpl(int64_t in_features, int64_t out_features)
      : Float8LinearImpl(torch::nn::LinearOptions(in_features, out_features)) {}
  explicit Float8LinearImpl(
      const torch::nn::LinearOptions& options, Float8Scaling scaling = Float8Scaling::tensorwise)
      : LinearImpl(options), scaling(scaling) {}

  at::Tensor forward(const at::Tensor& x) {
    return float8_linear(x, weight, bias.defined() ? std::optional(bias) : std::nullopt, scaling);
  }
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = {}) const override;
  void pretty_print(std::ostream& stream) const override;

  Float8Scaling scaling;
};
FSDP_MODULE(Float8Linear);

} // namespace nn

} // namespace fsdp
