#include "cli/train/rotary.h"

#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <numbers>

#include "cli/check.h"

namespace fsdp::cli {

std::string RotaryScaling::str() const {
  char text[160];
  if (original == 0) {
    std::snprintf(text, sizeof(text), "linear:%.17g", factor);
  } else {
    std::snprintf(
        text, sizeof(text), "llama3:%.17g,%.17g,%.17g,%lld", factor, low, high,
        static_cast<long long>(original));
  }
  return text;
}

std::optional<RotaryScaling> RotaryScaling::parse(const std::string& text) {
  if (text == "none") {
    return std::nullopt;
  }
  RotaryScaling scaling;
  long long original = 0;
  char rest = 0;
  const bool linear = std::sscanf(text.c_str(), "linear:%lf%c", &scaling.factor, &rest) == 1;
  const bool llama3 = !linear && std::sscanf(
                                     text.c_str(), "llama3:%lf,%lf,%lf,%lld%c", &scaling.factor,
                                     &scaling.low, &scaling.high, &original, &rest) == 4;
  scaling.original = original;
  const bool good = std::isfinite(scaling.factor) && scaling.factor > 0 &&
                    (linear || (scaling.low > 0 && scaling.high > scaling.low && original > 0));
  check_config(
      (linear || llama3) && good, "--rotary-scaling ", text,
      ": it must be none, linear:FACTOR or llama3:FACTOR,LOW,HIGH,ORIGINAL, for example "
      "llama3:8,1,4,8192");
  return scaling;
}

namespace {

/// By which angle each pair of numbers turns from one position to the next.
torch::Tensor angles_per_step(
    int64_t head_dim, double base, const std::string& text, const torch::TensorOptions& options) {
  const auto exponents = torch::arange(0, head_dim, 2, options) / head_dim;
  const auto plain = 1 / torch::pow(base, exponents);
  const auto scaling = RotaryScaling::parse(text);
  if (!scaling) {
    return plain;
  }
  const auto slow = plain / scaling->factor;
  if (scaling->original == 0) {
    return slow;
  }
  const auto turns = static_cast<double>(scaling->original) * plain / (2 * std::numbers::pi);
  const auto share = ((turns - scaling->low) / (scaling->high - scaling->low)).clamp(0, 1);
  return (1 - share) * slow + share * plain;
}

} // namespace

torch::Tensor rotary_table(
    int64_t time,
    int64_t head_dim,
    double base,
    const std::string& scaling,
    const torch::Tensor& like) {
  const auto options = like.options().dtype(torch::kFloat);
  const auto angles =
      torch::outer(torch::arange(time, options), angles_per_step(head_dim, base, scaling, options));
  return torch::stack({angles.cos(), angles.sin()}).to(like.scalar_type());
}

torch::Tensor rotate(const torch::Tensor& x, const torch::Tensor& rotary) {
  const auto halves = x.chunk(2, -1);
  const auto cos = rotary[0];
  const auto sin = rotary[1];
  return torch::cat(
      {halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, /*dim=*/-1);
}

} // namespace fsdp::cli
