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

/// The left and the right matrix of a product. It adds up along the columns of the left one.
Float8 left(const at::Tensor& matrix, Float8Scaling scaling, at::ScalarType dtype) {
  const bool by_rows = scaling == Float8Scaling::rowwise;
  return to_float8(matrix, by_rows ? std::optional(1) : std::nullopt, dtype);
}
Float8 right(const at::Tensor& matrix, Float8Scaling scaling) {
  const bool by_columns = scaling == Float8Scaling::rowwise;
  return to_float8(matrix, by_columns ? std::optional(0) : std::nullopt, at::kFloat8_e4m3fn);
}

at::ScalarType grad_dtype(Float8Scaling scaling) {
  return scaling == Float8Scaling::rowwise ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
}

/// Fills a matrix up with rows of zeros, which add nothing to a product over rows.
at::Tensor with_aligned_rows(const at::Tensor& matrix) {
  const auto missing = (kAligned - matrix.size(0) % kAligned) % kAligned;
  return missing == 0 || !matrix.is_cuda() ? matrix
                                           : at::constant_pad_nd(matrix, {0, 0, 0, missing});
}

/// Saves what backward needs of `x` and the weight, as it is. Backward rounds it anew, because its
/// products add up along other dims, and because the weight may be gathered again until then.
class Float8Matmul : public torch::autograd::Function<Float8Matmul> {
 public:
  static at::Tensor forward(
      torch::autograd::AutogradContext* context,
      const at::Tensor& x,
      const at::Tensor& weight,
      int64_t number) {
    const auto scaling = static_cast<Float8Scaling>(number);
    context->save_for_backward(
        {weight.requires_grad() ? x : at::Tensor(), x.requires_grad() ? weight : at::Tensor()});
    context->saved_data["scaling"] = number;
    return float8_product(
        left(x, scaling, at::kFloat8_e4m3fn), right(weight.t(), scaling), x.scalar_type(),
        /*fast=*/true);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list grads) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !c10::GradMode::is_enabled(), kFloat8Tag,
        "there is no gradient of its gradient; call backward without create_graph, or use a "
        "Linear");
    const auto saved = context->get_saved_variables();
    const auto& x = saved[0];
    const auto& weight = saved[1];
    const auto& grad = grads[0];
    const auto scaling = static_cast<Float8Scaling>(context->saved_data["scaling"].toInt());
    at::Tensor grad_x;
    at::Tensor grad_weight;
    if (context->needs_input_grad(0)) {
      grad_x = float8_product(
          left(grad, scaling, grad_dtype(scaling)), right(weight, scaling), grad.scalar_type(),
          /*fast=*/false);
    }
    if (context->needs_input_grad(1)) {
      grad_weight = float8_product(
          left(with_aligned_rows(grad).t(), scaling, grad_dtype(scaling)),
          right(with_aligned_rows(x), scaling), grad.scalar_type(), /*fast=*/false);
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
