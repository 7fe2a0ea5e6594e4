#pragma once

#include <string>
#include <vector>

#include <fsdp/checkpoint.h>

namespace fsdp::detail {

/// Applies rules to names. Throws ConfigError if a rule is not a regular expression.
class NameRules {
 public:
  explicit NameRules(const std::vector<NameRule>& rules);
  ~NameRules();
  NameRules(const NameRules&) = delete;
  NameRules& operator=(const NameRules&) = delete;

  /// Renames by the first rule that matches all of `name`. Returns `name` if no rule matches.
  std::string operator()(const std::string& name) const;

 private:
  struct Compiled;
  std::vector<Compiled> rules_;
};

} // namespace fsdp::detail
