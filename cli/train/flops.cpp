#include "cli/train/flops.h"

#include <glob.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <string_view>

namespace fsdp::cli {

namespace {

/// TFLOP/s of dense products, from the makers' data sheets: in 16 bits with sums in fp32, and in
/// fp32. A longer name stands before a shorter one that it contains.
struct Peak {
  std::string_view name;
  double half;
  double single;
};

constexpr Peak kPeaks[] = {
    {"GB200", 2500, 80},     {"B200", 2250, 75},     {"H200 NVL", 835, 60},
    {"H200", 989, 67},       {"H100 PCIe", 756, 51}, {"H100 NVL", 835, 60},
    {"H100", 989, 67},       {"A100", 312, 19.5},    {"A10", 125, 31.2},
    {"L40S", 362, 91.6},     {"L4", 121, 30.3},      {"RTX A6000", 154.8, 38.7},
    {"RTX 4090", 165, 82.6},
};

/// Whether the name contains these words.
bool has_word(const std::string& name, std::string_view word) {
  const auto at = name.find(word);
  const auto end = at + word.size();
  return at != std::string::npos && (end == name.size() || std::isalnum(name[end]) == 0);
}

} // namespace

double flops_per_token(const ModelDims& dims, int64_t context) {
  const auto queries = dims.heads * dims.head_dim();
  const auto keys = dims.kv_heads * dims.head_dim();
  const auto weights = dims.dim * (2 * queries + 2 * keys + 3 * dims.hidden);
  // Forward, and backward to the inputs and to the weights. LoRA leaves the weights as they are,
  // and its own matrices are too small to count.
  const double of_weight = dims.lora == "none" ? 6 : 4;
  auto flops = of_weight * static_cast<double>(dims.dim * dims.vocab); // of the output layer
  for (int64_t layer = 0; layer < dims.layers; ++layer) {
    const auto window = dims.window_of(layer);
    const auto seen = window > 0 ? std::min(window, context) : context;
    flops += of_weight * static_cast<double>(weights) + 12.0 * static_cast<double>(queries * seen);
  }
  return flops;
}

std::optional<double> peak_flops(const std::string& gpu, const std::string& dtype) {
  // Slower variants have the same name with a suffix.
  const bool is_slower = has_word(gpu, "Laptop") || has_word(gpu, "RTX 4090 D");
  for (const auto& [name, half, single] : kPeaks) {
    if (!is_slower && has_word(gpu, name)) {
      return 1e12 * (dtype == "fp32" ? single : half);
    }
  }
  return std::nullopt;
}

std::string gpu_name() {
  glob_t found{};
  std::string name;
  if (glob("/proc/driver/nvidia/gpus/*/information", 0, nullptr, &found) == 0) {
    std::ifstream file(found.gl_pathv[0]);
    for (std::string line; std::getline(file, line);) {
      if (line.starts_with("Model:")) {
        name = line; // spaces in front of the name do no harm
      }
    }
  }
  globfree(&found);
  return name;
}

} // namespace fsdp::cli
