#include "cli/train/flops.h"

#include <fsdp/meta_init.h>
#include <gtest/gtest.h>

namespace fsdp::cli {
namespace {

/// Against the matrices of a model: a token meets all but the embedding, which it only looks up.
TEST(Flops, AreThoseOfTheMatricesAndAttention) {
  ModelDims dims{
      .vocab = 300,
      .dim = 48,
      .layers = 3,
      .heads = 6,
      .kv_heads = 2,
      .hidden = 80,
      .head_size = 16};
  constexpr int64_t kContext = 40;
  double weights = 0;
  const MetaInit on_meta;
  const Transformer model(dims);
  for (const auto& item : model->named_parameters()) {
    const bool counts = item.value().dim() == 2 && item.key().find("embed") == std::string::npos;
    weights += counts ? static_cast<double>(item.value().numel()) : 0;
  }
  EXPECT_DOUBLE_EQ(flops_per_token(dims, kContext), 6 * weights + 12.0 * 3 * 96 * kContext);
  dims.tied = true; // the same product
  EXPECT_DOUBLE_EQ(flops_per_token(dims, kContext), 6 * weights + 12.0 * 3 * 96 * kContext);
  dims.window = 16;
  dims.window_from = 1;
  EXPECT_DOUBLE_EQ(flops_per_token(dims, kContext), 6 * weights + 12.0 * 96 * (kContext + 2 * 16));
}

TEST(Flops, PeaksOfKnownDevices) {
  EXPECT_EQ(peak_flops("NVIDIA H100 80GB HBM3", "bf16"), 989e12);
  EXPECT_EQ(peak_flops("NVIDIA H100 PCIe", "fp16"), 756e12);
  EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-80GB", "fp32"), 19.5e12);
  EXPECT_FALSE(peak_flops("", "bf16"));
  EXPECT_FALSE(peak_flops("NVIDIA L40", "bf16"));
  EXPECT_FALSE(peak_flops("NVIDIA RTX A1000", "bf16"));
}

} // namespace
} // namespace fsdp::cli
