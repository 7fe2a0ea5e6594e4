#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <string>

namespace fsdp::test {

/// Where models and batches of tests are: the CPU, or what FSDP_TEST_DEVICE
/// names, so that the engine's tests run on a GPU as they are.
inline c10::DeviceType test_device() {
  static const auto type = [] {
    const char* name = std::getenv("FSDP_TEST_DEVICE");
    return name && std::string(name) == "cuda" ? c10::kCUDA : c10::kCPU;
  }();
  return type;
}

/// Where it is missing, all tests of the binary are skipped.
struct TestDevice : testing::Environment {
  void SetUp() override {
    if (test_device() == c10::kCUDA && !torch::cuda::is_available()) {
      GTEST_SKIP() << "there is no GPU here";
    }
  }
};
inline testing::Environment* const test_device_environment =
    testing::AddGlobalTestEnvironment(new TestDevice);

/// Its default stream.
inline c10::Stream test_stream() {
  const c10::DeviceIndex index = test_device() == c10::kCPU ? -1 : 0;
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(test_device(), index));
}

/// Moves what has memory.
inline void to_test_device(torch::nn::Module& module) {
  const auto params = module.parameters();
  const bool on_meta = std::any_of(
      params.begin(), params.end(), [](const torch::Tensor& param) { return param.is_meta(); });
  if (test_device() != c10::kCPU && !on_meta) {
    module.to(test_device());
  }
}

} // namespace fsdp::test
