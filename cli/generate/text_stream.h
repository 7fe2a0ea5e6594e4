#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::cli {

/// Passes on a text that comes in pieces. A piece may end inside of a character, or of a text at
/// which to stop: then that part waits for the next piece.
class TextStream {
 public:
  TextStream(std::vector<std::string> stops, std::function<void(const std::string& text)> on_text)
      : stops_(std::move(stops)), on_text_(std::move(on_text)) {}

  /// Returns false if one of the texts at which to stop is there. It is not passed on.
  bool add(std::string_view piece);
  /// Passes on what waits.
  void finish();

 private:
  /// Passes on the first `size` bytes of what waits.
  void pass_on(size_t size);

  const std::vector<std::string> stops_;
  const std::function<void(const std::string& text)> on_text_;
  std::string waiting_;
};

/// How many bytes the first character of a text has in UTF-8: 0 if its end is missing. A byte that
/// begins no character counts as one.
size_t character_size(std::string_view text);

/// The text for a terminal: characters that could control it, and bytes that are no UTF-8, become
/// '?'.
std::string shown_text(std::string_view text);

} // namespace fsdp::cli
