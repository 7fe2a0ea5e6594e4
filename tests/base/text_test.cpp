#include "base/text.h"

#include <gtest/gtest.h>

#include <fsdp/error.h>

namespace fsdp::detail {
namespace {

TEST(Text, SplitKeepsEmptyParts) {
  EXPECT_EQ(split("a,,b,", ','), (std::vector<std::string>{"a", "", "b", ""}));
  EXPECT_EQ(split("", ','), std::vector<std::string>{""});
}

TEST(Text, JoinSeparates) {
  EXPECT_EQ(join(std::vector<int>{1, 2, 3}), "1, 2, 3");
  EXPECT_EQ(join(std::vector<int>{}), "");
}

TEST(Text, ParseIntTakesWholeNumbersOnly) {
  EXPECT_EQ(parse_int("-12", "x"), -12);
  for (const auto* bad : {"", "1x", " 1", "1.5", "99999999999999999999"}) {
    EXPECT_THROW(parse_int(bad, "x"), ConfigError) << bad;
  }
}

} // namespace
} // namespace fsdp::detail
