#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <string>

namespace fsdp::test {

/// The device of the tests' models and batches: the CPU, or the one that FSDP_TEST_DEVICE names.
/// Tests of the engine run on a GPU without a change.
inline c10::DeviceType test_device() {
  static const auto type = [] {
    const char* name = std::getenv("FSDP_TEST_DEVICE");
    return name && std::string(name) == "cuda" ? c10::kCUDA : c10::kCPU;
  }();
  return type;
}

/// Skips all tests of the binary if the device is missing.
struct TestDevice : testing::Environment {
  void SetUp() override {
    if (test_device() == c10::kCUDA && !torch::cuda::is_available()) {
      GTEST_SKIP() << "there is no GPU here";
    }
  }
};
inline testing::Environment* const test_device_environment =
    testing::AddGlobalTestEnvironment(new TestDevice);

/// The default stream of test_device().
inline c10::Stream test_stream() {
  const c10::DeviceIndex index = test_device() == c10::kCPU ? -1 : 0;
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(test_device(), index));
}

/// Moves `module` to test_device(), unless a part of it is on the meta device.
inline void to_test_device(torch::nn::Module& module) {
  const auto params = module.parameters();
  const bool on_meta = std::any_of(
      params.begin(), params.end(), [](const torch::Tensor& param) { return param.is_meta(); });
  if (test_device() != c10::kCPU && !on_meta) {
    module.to(test_device());
  }
}

} // namespace fsdp::test
