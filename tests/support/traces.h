#pragma once

// Shows the rank and the settings of a failure.

#include <fsdp/distributed.h>
#include <fsdp/policy.h>
#include <gtest/gtest.h>

#include <iostream>
#include <ostream>
#include <tuple>

/// A SCOPED_TRACE of variables, such as "reshard, dim = (true, 3)". GoogleTest keeps traces per
/// thread, so failures on a rank only show traces that are set inside of `run_ranks`.
#define SCOPED_TRACE_OF(...) \
  SCOPED_TRACE(#__VA_ARGS__ " = " + ::testing::PrintToString(::std::make_tuple(__VA_ARGS__)))

namespace fsdp {

// GoogleTest prints values of these types with `PrintTo`.

inline void PrintTo(const ReshardAfterForward& reshard, std::ostream* out) {
  *out
      << (reshard.is_auto()     ? "auto"
          : reshard.is_number() ? "a number"
          : reshard.ranks(1)    ? "true"
                                : "false");
}

inline void PrintTo(const MixedPrecisionPolicy& policy, std::ostream* out) {
  *out << testing::PrintToString(std::make_tuple(
      policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs));
}

namespace test {

/// Prints "rank 1 of 4" below every failure on a rank. The rank is a thread or a process.
struct RankOfFailure : testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed() && is_initialized()) {
      std::cout << "rank " << get_rank() << " of " << get_world_size() << std::endl;
    }
  }
};
inline const bool ranks_of_failures_are_printed = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new RankOfFailure);
  return true;
}();

} // namespace test
} // namespace fsdp
