#pragma once

// The model of FSDP2's memory tests, its sizes, and what is measured.

#include <fsdp/memory.h>
#include <fsdp/optim.h>

#include <array>
#include <memory>
#include <vector>

#include "support/sharded.h"

namespace fsdp::test {

constexpr int64_t kMB = 1000 * 1000;
// For activations, and what else is small beside the parameters.
constexpr int64_t kAllowance = 16 * kMB;

// Of the model below, in elements. Everything divides by two ranks.
constexpr int64_t kDim = 768;
constexpr int64_t kBlock = 12 * kDim * kDim + 9 * kDim; // `Bk` in the formulas
constexpr int64_t kRest = 82 * kDim;                    // `X`: embeddings, norm and output
constexpr int64_t kWhole = 3 * kBlock + kRest;          // `U`
constexpr int64_t kShard = kWhole / 2;                  // `S`
static_assert(kBlock == 7'084'800 && kRest == 62'976 && kWhole == 21'317'376); // as upstream's

inline const ModelArgs kMemoryArgs{
    .n_layers = 3,
    .vocab_size = 32,
    .dim = kDim,
    .n_heads = 12,
    .dropout_p = 0,
    .weight_tying = false};

inline int64_t bytes(int64_t numel) {
  return 4 * numel;
}

/// What this rank has allocated on a device since this was made.
class MemoryUsage {
 public:
  explicit MemoryUsage(c10::Device device)
      : device_(device), base_(memory_stats(device).allocated) {
    reset_peak();
  }
  int64_t now() const {
    return memory_stats(device_).allocated - base_;
  }
  int64_t peak() const {
    return memory_stats(device_).peak - base_;
  }
  void reset_peak() const {
    reset_peak_memory_stats(device_);
  }

 private:
  c10::Device device_;
  int64_t base_;
};

/// Not above the bound; and not below half of it, as where nothing is counted.
inline testing::AssertionResult within(int64_t used, int64_t bound) {
  // Not far below it either: then something else was measured.
  return used <= bound && used >= bound / 3
             ? testing::AssertionSuccess()
             : testing::AssertionFailure() << used << " bytes, for a bound of " << bound;
}

struct MemoryCase {
  const char* name;
  bool reshard = true;
  bool offload = false;
  bool optimizer_in_backward = false;
};

inline const std::array kMemoryCases{
    MemoryCase{.name = "Reshard"}, MemoryCase{.name = "Keep", .reshard = false},
    MemoryCase{.name = "Offload", .offload = true},
    MemoryCase{.name = "OptimizerInBackward", .optimizer_in_backward = true}};

/// One for all parameters, or one for each that steps as soon as it has a gradient.
inline std::vector<std::unique_ptr<optim::AdamW>> make_optimizers(
    torch::nn::Module& net, bool in_backward) {
  std::vector<std::unique_ptr<optim::AdamW>> optimizers;
  if (!in_backward) {
    optimizers.push_back(std::make_unique<optim::AdamW>(unique_parameters(net), 1e-2));
    return optimizers;
  }
  for (const auto& param : unique_parameters(net)) {
    optimizers.push_back(std::make_unique<optim::AdamW>(std::vector{param}, 1e-2));
    register_post_accumulate_grad_hook(
        param, [optimizer = optimizers.back().get()](const torch::Tensor&) {
          optimizer->step();
          optimizer->zero_grad();
        });
  }
  return optimizers;
}

} // namespace fsdp::test
