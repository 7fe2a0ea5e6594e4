#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/traces.h"

/// Expects equal sizes, dtypes and bits. NaN equals NaN.
#define EXPECT_SAME(actual, expected) EXPECT_TRUE(::fsdp::test::same(actual, expected))
/// Expects values that are equal up to the rounding of float.
#define EXPECT_CLOSE(actual, expected) \
  EXPECT_TRUE(torch::allclose((actual).cpu(), (expected).cpu(), 1e-6, 1e-6)) << actual

namespace fsdp::test {

inline testing::AssertionResult same(const torch::Tensor& actual, const torch::Tensor& expected) {
  if (actual.scalar_type() != expected.scalar_type() || actual.sizes() != expected.sizes()) {
    return testing::AssertionFailure()
           << "got " << actual.scalar_type() << actual.sizes() << ", expected "
           << expected.scalar_type() << expected.sizes();
  }
  const auto bytes = [](const torch::Tensor& tensor) {
    return tensor.cpu().contiguous().view(-1).view(torch::kUInt8);
  };
  if (bytes(actual).equal(bytes(expected))) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "got " << actual << "\nexpected " << expected;
}

/// The message of the Error that `statement` throws. The test fails if it throws none.
template <class Error, class Statement>
std::string message_of(Statement statement) {
  try {
    statement();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return "";
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

inline testing::AssertionResult contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos
             ? testing::AssertionSuccess()
             : testing::AssertionFailure() << "no '" << part << "' in: " << text;
}

} // namespace fsdp::test
