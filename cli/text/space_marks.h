#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fsdp::cli {

/// The character that stands for a space in the vocabularies of SentencePiece.
inline constexpr std::string_view kSpaceMark = "\u2581";

/// What lies before a text.
enum class Before {
  kNothing,
  kRawToken,        // an added token that is found before the text is normalized
  kNormalizedToken, // an added token that is found afterwards
  kText,
};

/// Where a tokenizer of SentencePiece's kind writes marks for spaces, and how it divides a text
/// into words. A mark can also stand before a text that does not begin with a space.
struct SpaceMarks {
  enum class Prepend { kNever, kFirst, kAlways };

  std::string prefix;                   // the normalizer puts it before each text
  bool replaces = false;                // the normalizer replaces spaces
  bool has_metaspace = false;           // the pre-tokenizer replaces spaces
  Prepend metaspace = Prepend::kNever;  // when the pre-tokenizer puts a mark before a text
  bool divides_at_marks = false;        // a word ends before each mark
  bool divides_after_spaces = false;    // a word ends after each space
  bool marks_only_begin_tokens = false; // see Note [Words between marks]

  /// Whether the tokens of a text depend on what lies before it.
  bool depends_on_before() const {
    return !prefix.empty() || metaspace != Prepend::kNever;
  }

  /// What the normalizer makes of a text.
  std::string normalized(std::string_view text, Before before) const;
  /// What the pre-tokenizer makes of a normalized text, before it divides it.
  std::string marked(std::string_view text, Before before) const;

  /// Calls `visit` with each word of a text with marks.
  template <class Visit>
  void divide(std::string_view text, const Visit& visit) const {
    size_t begin = 0;
    for (size_t at = 0; at < text.size(); ++at) {
      if (at > begin && is_border(text, at)) {
        visit(text.substr(begin, at - begin));
        begin = at;
      }
    }
    if (begin < text.size()) {
      visit(text.substr(begin));
    }
  }

 private:
  /// Whether a word begins at this position, which is not the first one.
  bool is_border(std::string_view text, size_t at) const;
};

/// A text in which something else stands for each mark.
std::string without_marks(std::string_view text, std::string_view space);

// Note [Words between marks]
// SentencePiece learns its vocabulary word by word. So in a token, marks come first; or the token
// has only marks. Then no merge joins a mark to another character before it, and the parts of a
// text on both sides of such a position have the same tokens alone as together. So a text becomes
// words, of which most were seen before, even if the tokenizer does not divide it. The reader
// checks this in the merges. If one of them goes over such a position, or if `ignore_merges` looks
// up whole words, a text that the tokenizer does not divide stays whole.

} // namespace fsdp::cli
