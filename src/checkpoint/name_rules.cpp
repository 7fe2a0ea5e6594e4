#include "checkpoint/name_rules.h"

#include <utility>

#include "base/check.h"

namespace fsdp::detail {

namespace {

// The compiler of regular expressions recurses: a longer pattern could exhaust the stack.
constexpr size_t kLongestPattern = 1000;

// The usual way to match tries all ways one after another: "(a*)*b" then takes forever, and a long
// name exhausts the stack. libstdc++ can also follow all ways at once.
#ifdef __GLIBCXX__
constexpr auto kSyntax = std::regex::ECMAScript | std::regex_constants::__polynomial;
#else
constexpr auto kSyntax = std::regex::ECMAScript;
#endif

} // namespace

std::regex user_pattern(const std::string& text, const std::string& what) {
  FSDP_CHECK_AS(
      ConfigError, text.size() <= kLongestPattern, what, " begins with '", text.substr(0, 60),
      "' and has ", text.size(), " characters; a regular expression may have ", kLongestPattern);
  try {
    return std::regex(text, kSyntax);
  } catch (const std::regex_error& error) {
    FSDP_CHECK_AS(
        ConfigError, error.code() != std::regex_constants::error_complexity, what, " '", text,
        "' refers back to a group, so that matching could take forever; use the groups only in the "
        "new name");
    FSDP_THROW(ConfigError, what, " '", text, "' is no regular expression: ", error.what());
  }
}

Rename renaming_by(const std::vector<NameRule>& rules) {
  std::vector<std::pair<std::regex, std::string>> compiled;
  for (const auto& rule : rules) {
    compiled.emplace_back(user_pattern(rule.from, "the name rule"), rule.to);
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
