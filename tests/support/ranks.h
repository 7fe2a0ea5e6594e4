#pragma once

#include <c10/util/Exception.h>
#include <fsdp/distributed.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace fsdp::test {

/// Ranks are threads, unless FSDP_TEST_BACKEND names a backend. Then a launcher has started this
/// binary once per rank, and all tests share that world:
///   FSDP_TEST_BACKEND=gloo fsdp run -n 4 -- composition_tests
inline std::string test_backend() {
  const char* name = std::getenv("FSDP_TEST_BACKEND");
  return name ? name : "";
}

struct TestWorld : testing::Environment {
  void SetUp() override {
    const char* size = std::getenv("WORLD_SIZE");
    const int num_ranks = size ? std::atoi(size) : 1;
    if (test_backend() == "nccl" && torch::cuda::device_count() < num_ranks &&
        !nccl_shares_gpus()) {
      GTEST_SKIP()
          << "NCCL cannot share a GPU here: it needs version 2.30 or later (LD_PRELOAD), and "
             "NCCL_MULTI_RANK_GPU_ENABLE=1";
    }
    if (!test_backend().empty()) {
      init_process_group({.backend = test_backend(), .timeout = std::chrono::minutes(1)});
    }
  }
  void TearDown() override {
    if (is_initialized()) {
      destroy_process_group();
    }
  }
};
inline testing::Environment* const test_world = testing::AddGlobalTestEnvironment(new TestWorld);

/// Hides fsdp::run_ranks. Skips the test if the launched world has another number of ranks. What a
/// rank throws also says how many ranks there are.
template <class Body>
void run_ranks(int num_ranks, const Body& body) {
  if (test_backend().empty()) {
    try {
      fsdp::run_ranks(num_ranks, body);
    } catch (c10::Error& error) {
      error.add_context(c10::str("with ", num_ranks, " ranks"));
      throw;
    }
    return;
  }
  if (num_ranks != get_world_size()) {
    GTEST_SKIP() << "it needs " << num_ranks << " ranks";
  }
  body(get_rank());
  default_group().barrier();
}

} // namespace fsdp::test
