#pragma once

#include "checkpoint/checkpoints.h"

namespace fsdp::test {

/// A state that is told from others by its number.
inline StateDict numbered(int64_t number) {
  auto state = state_with("w", torch::full({4}, number));
  state.insert("number", number);
  return state;
}

/// The number of the state that is saved at `path`.
inline int64_t number_in(const std::string& path) {
  auto state = numbered(-1);
  load(state, path);
  EXPECT_SAME(
      std::get<at::Tensor>(state.at("w")), torch::full({4}, std::get<int64_t>(state.at("number"))));
  return std::get<int64_t>(state.at("number"));
}

} // namespace fsdp::test
