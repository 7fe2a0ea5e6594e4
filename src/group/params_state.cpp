#include "group/params_state.h"

#include <c10/util/Exception.h>

#include <array>

namespace fsdp::detail {

namespace {

bool may_follow(ParamsState from, ParamsState to) {
  using enum ParamsState;
  switch (to) {
    case Sharded:
      return true;
    case Gathering:
      return from == Sharded || from == Divided;
    case Unsharded:
      return from == Gathering || from == Kept;
    case Kept:
      return from == Unsharded || from == KeptForGraph;
    case KeptForGraph:
    case Divided:
      return from == Unsharded;
    case Outdated:
      return from == Kept;
  }
  return false;
}

} // namespace

const char* to_string(ParamsState state) {
  constexpr std::array kNames{"Sharded", "Gathering", "Unsharded", "KeptForGraph",
                              "Kept",    "Outdated",  "Divided"};
  return kNames.at(static_cast<size_t>(state));
}

void check_transition(ParamsState from, ParamsState to, const std::string& group) {
  TORCH_INTERNAL_ASSERT(
      may_follow(from, to), "group '", group, "' cannot become ", to_string(to), " while it is ",
      to_string(from), "; see Note [The life of a group]");
}

} // namespace fsdp::detail
