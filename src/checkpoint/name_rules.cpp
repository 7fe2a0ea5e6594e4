#include "checkpoint/name_rules.h"

#include <regex>

#include "base/check.h"

namespace fsdp::detail {

struct NameRules::Compiled {
  std::regex from;
  std::string to;
};

NameRules::NameRules(const std::vector<NameRule>& rules) {
  for (const auto& rule : rules) {
    try {
      rules_.push_back({std::regex(rule.from), rule.to});
    } catch (const std::regex_error& error) {
      FSDP_THROW(
          ConfigError, "the name rule '", rule.from, "' -> '", rule.to,
          "' is no regular expression: ", error.what());
    }
  }
}

NameRules::~NameRules() = default;

std::string NameRules::operator()(const std::string& name) const {
  for (const auto& rule : rules_) {
    std::smatch match;
    if (std::regex_match(name, match, rule.from)) {
      return match.format(rule.to);
    }
  }
  return name;
}

} // namespace fsdp::detail
