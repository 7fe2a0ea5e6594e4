#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::cli {

/// Divides a text by regular expressions, as tokenizers do before they join bytes.
class Splitter {
 public:
  /// Each pattern divides what the one before it left. Throws ConfigError if a pattern cannot be
  /// compiled, or if the tool was built without the libraries that this needs.
  explicit Splitter(const std::vector<std::string>& patterns);

  /// Calls `visit` with each match, and with what lies between two of them, from the beginning of
  /// the text to its end. The text must be UTF-8. Threads may call it at the same time.
  void split(std::string_view text, const std::function<void(std::string_view)>& visit) const;

 private:
  struct Pattern;
  std::vector<std::shared_ptr<const Pattern>> patterns_;
};

/// The position of the first byte that is not UTF-8, if there is one.
std::optional<size_t> first_not_utf8(std::string_view text);

/// The text with composed characters (NFC): one for the letter and its accent.
std::string composed(std::string_view text);

} // namespace fsdp::cli
