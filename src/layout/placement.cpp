#include <fsdp/placement.h>

#include <c10/util/StringUtil.h>

#include "base/text.h"

namespace fsdp {

namespace {

struct Name {
  std::string operator()(const Replicate&) const {
    return "R";
  }
  std::string operator()(const Shard& shard) const {
    return c10::str("S(", shard.dim, ")");
  }
  std::string operator()(const StridedShard& shard) const {
    return c10::str("_S(", shard.dim, ", ", shard.split_factor, ")");
  }
  std::string operator()(const BlockShard& shard) const {
    return c10::str("B(", shard.dims, ")");
  }
  std::string operator()(const Partial& partial) const {
    return c10::str("P(", partial.op.str(), ")");
  }
};

} // namespace

std::string to_string(const Placement& placement) {
  return std::visit(Name{}, placement);
}

std::string to_string(const std::vector<Placement>& placements) {
  std::vector<std::string> names;
  for (const auto& placement : placements) {
    names.push_back(to_string(placement));
  }
  return c10::str("(", detail::join(names), ")");
}

} // namespace fsdp
