// Stands for splitter.cpp if PCRE2 or utf8proc was not found.
#include "cli/check.h"
#include "cli/text/splitter.h"

namespace fsdp::cli {

struct Splitter::Pattern {};

Splitter::Splitter(const std::vector<std::string>& /*patterns*/) {
  throw_config_error(
      "this fsdp was built without PCRE2 and utf8proc, which tokenizers need; install them "
      "(Debian: libpcre2-dev libutf8proc-dev), remove build/, and build it again");
}

// No Splitter exists, so nobody calls these.
void Splitter::split(
    std::string_view /*text*/, const std::function<void(std::string_view)>& /*visit*/) const {}

std::optional<size_t> first_not_utf8(std::string_view /*text*/) {
  return std::nullopt;
}

std::string composed(std::string_view text) {
  return std::string(text);
}

} // namespace fsdp::cli
