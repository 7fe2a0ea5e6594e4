#include "checkpoint/name_rules.h"

#include <regex>
#include <utility>

#include "base/check.h"

namespace fsdp::detail {

Rename renaming_by(const std::vector<NameRule>& rules) {
  std::vector<std::pair<std::regex, std::string>> compiled;
  for (const auto& rule : rules) {
    try {
      compiled.emplace_back(std::regex(rule.from), rule.to);
    } catch (const std::regex_error& error) {
      FSDP_THROW(
          ConfigError, "the name rule '", rule.from, "' -> '", rule.to,
          "' is no regular expression: ", error.what());
    }
  }
  return [compiled = std::move(compiled)](const std::string& name) {
    for (const auto& [from, to] : compiled) {
      std::smatch match;
      if (std::regex_match(name, match, from)) {
        return match.format(to);
      }
    }
    return name;
  };
}

} // namespace fsdp::detail
