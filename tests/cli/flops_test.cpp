#include "cli/train/flops.h"

#include <fsdp/meta_init.h>
#include <gtest/gtest.h>

#include "cli/train/progress.h"

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
  EXPECT_EQ(peak_flops("NVIDIA B200", "bf16"), 2250e12);
  EXPECT_EQ(peak_flops("NVIDIA GB200", "bf16"), 2500e12);
  EXPECT_EQ(peak_flops("NVIDIA A10", "bf16"), 125e12);
  EXPECT_EQ(peak_flops("NVIDIA L4", "bf16"), 121e12);
  EXPECT_EQ(peak_flops("NVIDIA RTX A6000", "bf16"), 154.8e12);
  EXPECT_EQ(peak_flops("NVIDIA GeForce RTX 4090", "bf16"), 165e12);
  EXPECT_FALSE(peak_flops("", "bf16"));
  EXPECT_FALSE(peak_flops("NVIDIA L40", "bf16"));
  EXPECT_FALSE(peak_flops("NVIDIA RTX A1000", "bf16"));
  EXPECT_FALSE(peak_flops("NVIDIA A10G", "bf16"));
  EXPECT_FALSE(peak_flops("NVIDIA GeForce RTX 4090 D", "bf16"));
  EXPECT_FALSE(peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"));
}

TEST(Flops, LineOfAStepShowsTheUtilisation) {
  const auto line_of = [](std::optional<double> utilisation) {
    Screen screen;
    Progress progress(screen, /*steps=*/1, /*tokens_per_step=*/1000);
    testing::internal::CaptureStdout();
    progress.update({.step = 1, .tokens_per_s = 1000, .utilisation = utilisation});
    return testing::internal::GetCapturedStdout();
  };
  EXPECT_NE(line_of(0.4).find("  MFU "), std::string::npos);
  EXPECT_EQ(line_of({}).find("MFU"), std::string::npos);
}

} // namespace
} // namespace fsdp::cli
