// Which peers are called gone.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>

#include "launch/liveness.h"

namespace fsdp::detail {
namespace {

constexpr const char* kHere = "127.0.0.1";

/// Where nobody listens any more.
std::string dead_endpoint() {
  return Liveness(kHere).endpoint();
}

TEST(Liveness, OnlyWhoAnsweredOnceIsCalledGone) {
  Liveness mine(kHere);
  auto second = std::make_unique<Liveness>(kHere);
  const Liveness third(kHere);
  mine.set_peers({mine.endpoint(), second->endpoint(), third.endpoint(), dead_endpoint()});
  EXPECT_EQ(mine.gone(), std::vector<int>());
  second.reset(); // a connection to it is kept: it ends
  EXPECT_EQ(mine.gone(), std::vector<int>{1});
  EXPECT_TRUE(mine.is_gone(1));
  EXPECT_FALSE(mine.is_gone(2));
  EXPECT_FALSE(mine.is_gone(3));
}

TEST(Liveness, WhoDiesBeforeAnybodyAsksIsGone) {
  Liveness mine(kHere);
  auto second = std::make_unique<Liveness>(kHere);
  mine.set_peers({mine.endpoint(), second->endpoint()});
  second.reset();
  EXPECT_EQ(mine.gone(), std::vector<int>{1});
}

/// An address for documentation: no answer, or no way there, as behind a firewall.
TEST(Liveness, ManyWhoCannotBeReachedAreWaitedForTogether) {
  Liveness mine(kHere);
  const std::vector<std::string> nowhere(40, "192.0.2.1 9");
  const auto start = std::chrono::steady_clock::now();
  mine.set_peers(nowhere);
  EXPECT_EQ(mine.gone(), std::vector<int>());
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

} // namespace
} // namespace fsdp::detail
