#include "cli/generate/text_stream.h"

#include <algorithm>

namespace fsdp::cli {

bool TextStream::add(std::string_view piece) {
  waiting_ += piece;
  auto stop_at = std::string::npos;
  for (const auto& stop : stops_) {
    stop_at = std::min(stop_at, waiting_.find(stop));
  }
  if (stop_at != std::string::npos) {
    pass_on(stop_at);
    waiting_.clear();
    return false;
  }
  size_t whole = 0; // bytes of characters that are all there
  while (whole < waiting_.size()) {
    const auto size = character_size(std::string_view(waiting_).substr(whole));
    if (size == 0) {
      break;
    }
    whole += size;
  }
  auto ready = whole;
  for (const auto& stop : stops_) {
    // What waits may end with the beginning of `stop`.
    for (auto length = std::min(stop.size() - 1, waiting_.size()); length > 0; --length) {
      if (waiting_.ends_with(std::string_view(stop).substr(0, length))) {
        ready = std::min(ready, waiting_.size() - length);
        break;
      }
    }
  }
  pass_on(ready);
  return true;
}

void TextStream::finish() {
  pass_on(waiting_.size());
}

void TextStream::pass_on(size_t size) {
  if (size > 0) {
    on_text_(waiting_.substr(0, size));
    waiting_.erase(0, size);
  }
}

size_t character_size(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  const size_t size = first < 0xc2 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 1;
  for (size_t i = 1; i < size; ++i) {
    if (i == text.size()) {
      return 0;
    }
    const auto byte = static_cast<unsigned char>(text[i]);
    // The second byte says more: longer forms than needed, and surrogates, are no UTF-8.
    const auto least = i > 1 ? 0x80 : first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    const auto most = i > 1 ? 0xbf : first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (byte < least || byte > most) {
      return 1;
    }
  }
  return size;
}

std::string shown_text(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const auto size = std::max<size_t>(1, character_size(text));
    const auto first = static_cast<unsigned char>(text[0]);
    // U+0080 to U+009F control terminals, too.
    const bool is_plain = size == 1
                              ? first == '\n' || first == '\t' || (first >= ' ' && first < 0x7f)
                              : first != 0xc2 || static_cast<unsigned char>(text[1]) >= 0xa0;
    result += is_plain ? text.substr(0, size) : "?";
    text.remove_prefix(size);
  }
  return result;
}

} // namespace fsdp::cli
