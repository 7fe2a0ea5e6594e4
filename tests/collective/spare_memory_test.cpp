#include <gtest/gtest.h>
#include <torch/torch.h>

#include "collective/spare_memory.h"

namespace fsdp::detail {
namespace {

TEST(SpareMemory, IsThatOfTheLastBufferOfTheSameSize) {
  SpareMemory memory;
  auto buffer = memory.empty(100, torch::kFloat);
  const auto* address = buffer.const_data_ptr();
  memory.keep(std::move(buffer));
  buffer = memory.empty(100, torch::kFloat);
  EXPECT_EQ(buffer.const_data_ptr(), address);
  EXPECT_FALSE(memory.kept().defined());
  auto second = memory.empty(100, torch::kFloat); // nothing is kept any more
  EXPECT_NE(second.const_data_ptr(), address);
  memory.keep(std::move(buffer));
  memory.keep(std::move(second)); // takes its place
  EXPECT_NE(memory.kept().const_data_ptr(), address);
}

TEST(SpareMemory, IsFreedIfItDoesNotFit) {
  SpareMemory memory;
  for (const auto& [numel, dtype] : {std::pair(99L, torch::kFloat), {100L, torch::kInt}}) {
    memory.keep(memory.empty(100, torch::kFloat));
    ASSERT_TRUE(memory.kept().defined());
    const auto other = memory.empty(numel, dtype);
    EXPECT_EQ(other.numel(), numel);
    EXPECT_EQ(other.scalar_type(), dtype);
    EXPECT_FALSE(memory.kept().defined());
  }
  memory.keep(memory.empty(100, torch::kFloat));
  memory.free();
  EXPECT_FALSE(memory.kept().defined());
}

TEST(SpareMemory, IsNeverThatOfATensorThatSomebodyHas) {
  SpareMemory memory;
  auto buffer = memory.empty(100, torch::kFloat);
  const auto view = buffer.narrow(0, 10, 10);
  memory.keep(std::move(buffer));
  EXPECT_FALSE(memory.kept().defined());
  const auto copy = memory.empty(100, torch::kFloat);
  memory.keep(copy);
  EXPECT_FALSE(memory.kept().defined());
  memory.keep(torch::Tensor());
  EXPECT_FALSE(memory.kept().defined());
}

TEST(SpareMemory, IsMadeForTrainingInInferenceModeToo) {
  SpareMemory memory;
  const c10::InferenceMode inference;
  EXPECT_FALSE(memory.empty(100, torch::kFloat).is_inference());
}

} // namespace
} // namespace fsdp::detail
