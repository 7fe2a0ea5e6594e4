#include "cli/text/token_text.h"

#include <charconv>
#include <optional>
#include <string_view>
#include <utility>

#include "cli/text/space_marks.h"
#include "cli/text/splitter.h"
#include "cli/text/tokenizer_parts.h"

namespace fsdp::cli {

namespace {

/// Removes a text from the beginning of a piece, at most `most` times. Returns how often it may
/// still be removed from what follows.
size_t strip(std::string& piece, const std::string& content, size_t most) {
  size_t done = 0;
  while (most > 0 && std::string_view(piece).substr(done).starts_with(content)) {
    done += content.size();
    --most;
  }
  piece.erase(0, done);
  return piece.empty() ? most : 0;
}

} // namespace

std::optional<char> byte_of_entry(std::string_view entry) {
  if (entry.size() != 6 || !entry.starts_with("<0x") || !entry.ends_with('>')) {
    return std::nullopt;
  }
  unsigned value = 0;
  const auto* end = entry.data() + 5;
  const auto found = std::from_chars(end - 2, end, value, 16);
  return found.ptr == end ? std::optional(static_cast<char>(value)) : std::nullopt;
}

TokenText::TokenText(const Tokenizer& tokenizer, bool begins) : tokenizer_(tokenizer) {
  for (const auto& step : tokenizer.parts_->decoder) {
    states_.push_back({.bytes = "", .left = begins ? step.count : 0});
  }
}

std::string TokenText::add(int64_t token) {
  const auto& bytes = tokenizer_.bytes_of(token); // throws if there is no such token
  if (!tokenizer_.parts_->marks) {                // byte-level
    return bytes;
  }
  std::string text;
  pass(0, tokenizer_.parts_->entries[static_cast<size_t>(token)], text);
  return text;
}

std::string TokenText::finish() {
  std::string text;
  for (size_t step = 0; step < states_.size(); ++step) {
    pass_bytes(step, text);
  }
  return text;
}

void TokenText::pass(size_t step, std::string piece, std::string& text) {
  if (step == states_.size()) {
    text += piece;
    return;
  }
  const auto& what = tokenizer_.parts_->decoder[step];
  auto& state = states_[step];
  switch (what.kind) {
    case DecodeStep::Kind::kSpaces:
      piece = without_marks(piece, " ");
      break;
    case DecodeStep::Kind::kBytes:
      if (const auto byte = byte_of_entry(piece)) {
        state.bytes += *byte;
        return;
      }
      pass_bytes(step, text);
      break;
    case DecodeStep::Kind::kStrip:
      if (what.fused) {
        state.left = strip(piece, what.content, state.left);
      } else {
        strip(piece, what.content, what.count);
      }
      break;
    case DecodeStep::Kind::kMetaspace:
      piece = without_marks(piece, state.left > 0 ? "" : " ");
      state.left = 0;
      break;
  }
  pass(step + 1, std::move(piece), text);
}

void TokenText::pass_bytes(size_t step, std::string& text) {
  const auto bytes = std::exchange(states_[step].bytes, "");
  if (bytes.empty()) {
    return;
  }
  if (!first_not_utf8(bytes)) {
    pass(step + 1, bytes, text);
    return;
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    pass(step + 1, "\ufffd", text);
  }
}

} // namespace fsdp::cli
