#include <fsdp/float8.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <ostream>

#include "float8/float8.h"

namespace fsdp {

namespace detail {

namespace {

constexpr const char* kFloat8Tag = "[float8_linear] ";
constexpr int64_t kAligned = 16; // elements; kernels of GPUs want multiples of it

/// Fills a matrix up with rows of zeros, which add nothing to a product over rows.
Float8 with_aligned_rows(const Float8& matrix) {
  const auto missing = (kAligned - matrix.data.size(0) % kAligned) % kAligned;
  if (missing == 0 || !matrix.data.is_cuda()) {
    return matrix;
  }
  const auto bytes = at::constant_pad_nd(matrix.data.view(at::kByte), {0, 0, 0, missing});
  return {bytes.view(matrix.data.scalar_type()), matrix.scale};
}

/// Saves `x` and the weight as they are, so that autograd keeps no other copy of `x`, and the
/// weight may be gathered again until backward. Backward rounds both anew. If all values of `x`
/// share a scale, it is that of forward.
class Float8Matmul : public torch::autograd::Function<Float8Matmul> {
 public:
  static at::Tensor forward(
      torch::autograd::AutogradContext* context,
      const at::Tensor& x,
      const at::Tensor& weight,
      int64_t number) {
    const bool by_rows = static_cast<Float8Scaling>(number) == Float8Scaling::rowwise;
    const auto shared = by_rows ? std::optional<int64_t>(1) : std::nullopt;
    const auto left = to_float8(x, shared);
    const bool needs_x = weight.requires_grad();
    context->save_for_backward(
        {needs_x ? x : at::Tensor(), needs_x && !by_rows ? left.scale : at::Tensor(),
         x.requires_grad() ? weight : at::Tensor()});
    context->saved_data["by_rows"] = by_rows;
    return float8_product(left, to_float8(weight, shared).t(), x.scalar_type(), /*fast=*/true);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list grads) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !c10::GradMode::is_enabled(), kFloat8Tag,
        "there is no gradient of its gradient; call backward without create_graph, or use a "
        "Linear");
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto& scale_of_x = saved[1];
    const auto& weight = saved[2];
    const auto& grad = grads[0];
    const bool by_rows = context->saved_data["by_rows"].toBool();
    // Each product has scales along the dim over which it adds up, or the same one for both.
    const auto with_one_scale =
        by_rows ? Float8() : to_float8(grad, std::nullopt, at::kFloat8_e5m2);
    const auto rounded_grad = [&](int64_t dim) {
      return by_rows ? to_float8(grad, dim) : with_one_scale;
    };
    const auto shared = by_rows ? std::optional<int64_t>(0) : std::nullopt;
    at::Tensor grad_x;
    at::Tensor grad_weight;
    if (context->needs_input_grad(0)) {
      grad_x = float8_product(
          rounded_grad(1), to_float8(weight, shared), grad.scalar_type(), /*fast=*/false);
    }
    if (context->needs_input_grad(1)) {
      const auto right =
          by_rows ? to_float8(x, shared) : to_float8_by(scale_of_x, x, at::kFloat8_e4m3fn);
      grad_weight = float8_product(
          with_aligned_rows(rounded_grad(0)).t(), with_aligned_rows(right), grad.scalar_type(),
          /*fast=*/false);
    }
    return {grad_x, grad_weight, {}};
  }
};

void check(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  TORCH_CHECK_VALUE(
      weight.defined() && weight.dim() == 2, kFloat8Tag, "the weight must be a matrix");
  TORCH_CHECK_VALUE(
      x.defined() && x.dim() >= 1 && x.size(-1) == weight.size(1), kFloat8Tag, "an input of sizes ",
      x.defined() ? x.sizes() : at::IntArrayRef(), " does not fit a weight of sizes ",
      weight.sizes());
  TORCH_CHECK_TYPE(
      x.scalar_type() == weight.scalar_type() &&
          (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 ||
           x.scalar_type() == at::kHalf),
      kFloat8Tag, "input and weight must both be fp32, bf16 or fp16, not ", x.scalar_type(),
      " and ", weight.scalar_type());
  TORCH_CHECK_VALUE(
      !bias.defined() || (bias.sizes() == weight.sizes().slice(0, 1) &&
                          bias.scalar_type() == weight.scalar_type()),
      kFloat8Tag, "the bias must be a vector of ", weight.size(0),
      " elements in the weight's dtype");
  TORCH_CHECK_VALUE(
      !x.is_cuda() || (weight.size(0) % kAligned == 0 && weight.size(1) % kAligned == 0),
      kFloat8Tag, "GPUs multiply float8 matrices whose sizes are multiples of ", kAligned,
      ", and the weight's are ", weight.sizes(), "; use a Linear here");
}

} // namespace

} // namespace detail

at::Tensor float8_linear(
    const at::Tensor& x,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    Float8Scaling scaling) {
  const auto shift = bias.value_or(at::Tensor());
  detail::check(x, weight, shift);
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  const auto rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  const auto result = detail::Float8Matmul::apply(
      x.reshape({rows, weight.size(1)}), weight, static_cast<int64_t>(scaling));
  return (shift.defined() ? result + shift : result).view(sizes);
}

namespace nn {

std::shared_ptr<torch::nn::Module> Float8LinearImpl::clone(
    const std::optional<c10::Device>& device) const {
  const at::NoGradGuard no_grad;
  const auto copy_to = [&](const at::Tensor& to, const at::Tensor& from) {
    if (from.defined()) {
      to.set_data(from.to(device.value_or(from.device())).clone());
      to.set_requires_grad(from.requires_grad());
    }
  };
  auto copy = std::make_shared<Float8LinearImpl>(options, scaling);
  copy_to(copy->weight, weight);
  copy_to(copy->bias, bias);
  copy->train(is_training());
  return copy;
}

void Float8LinearImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "fsdp::nn::Float8Linear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features() << ", bias=" << options.bias()
         << ", scaling=" << (scaling == Float8Scaling::rowwise ? "rowwise" : "tensorwise") << ')';
}

} // namespace nn

} // namespace fsdp
