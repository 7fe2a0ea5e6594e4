#pragma once

#include <string>
#include <vector>

#include <fsdp/checkpoint.h>

namespace fsdp::detail {

/// Applies rules to names; throws ConfigError for a rule that is no regular expression.
class NameRules {
 public:
  explicit NameRules(const std::vector<NameRule>& rules);
  ~NameRules();
  NameRules(const NameRules&) = delete;
  NameRules& operator=(const NameRules&) = delete;

  /// By the first rule that matches all of `name`; without any, the name itself.
  std::string operator()(const std::string& name) const;

 private:
  struct Compiled;
  std::vector<Compiled> rules_;
};

} // namespace fsdp::detail
