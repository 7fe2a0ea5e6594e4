#pragma once

#include "support/gpu.h"
#include "support/ranks.h"

namespace fsdp::test {

/// Tests of several ranks over NCCL, which a launcher has started: ctest -L nccl.
class NcclRanks : public testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    if (test_backend() != "nccl") {
      GTEST_SKIP() << "it needs ranks over nccl: ctest -L nccl";
    }
  }
};

} // namespace fsdp::test
