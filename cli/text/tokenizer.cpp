#include "cli/text/tokenizer.h"

#include <algorithm>
#include <iterator>
#include <list>
#include <unordered_map>
#include <utility>

#include "cli/check.h"
#include "cli/text/tokenizer_parts.h"

namespace fsdp::cli {

namespace {

/// Whether the character with this byte is whitespace, or controls something.
bool is_space(std::string_view text, size_t at) {
  while (at > 0 && (text[at] & 0xc0) == 0x80) {
    --at;
  }
  static constexpr std::string_view kSpaces[] = {"\u0085", "\u00a0", "\u1680", "\u180e", "\u2000",
                                                 "\u2001", "\u2002", "\u2003", "\u2004", "\u2005",
                                                 "\u2006", "\u2007", "\u2008", "\u2009", "\u200a",
                                                 "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};
  const auto first = static_cast<unsigned char>(text[at]);
  return first <= ' ' || std::any_of(std::begin(kSpaces), std::end(kSpaces), [&](auto space) {
           return text.substr(at).starts_with(space);
         });
}

/// What lies before the text that follows `text`, if its tokens depend on that.
Before before_next(const Tokenizer::Parts& parts, std::string_view text) {
  if (!parts.marks || !parts.marks->depends_on_before()) {
    return Before::kText;
  }
  auto begin = Before::kNothing; // what lies before the last part
  std::string_view last;
  parts.raw.split(
      text, [&](std::string_view part) { last = part; },
      [&](int64_t) { begin = Before::kRawToken; });
  if (last.empty()) {
    return begin;
  }
  auto end = Before::kText;
  parts.normalized.split(
      parts.marks->normalized(last, begin),
      [&](std::string_view part) { end = part.empty() ? end : Before::kText; },
      [&](int64_t) { end = Before::kNormalizedToken; });
  return end;
}

/// Makes the tokens of one text.
class Encoder {
 public:
  explicit Encoder(const Tokenizer::Parts& parts) : parts_(parts) {}

  std::vector<int64_t> encode(std::string_view text, Before before) {
    parts_.raw.split(
        text, [&](std::string_view part) { add_raw(part, before); },
        [&](int64_t token) {
          tokens_.push_back(token);
          before = Before::kRawToken;
        });
    return std::move(tokens_);
  }

 private:
  /// What lies between added tokens that are found before it is normalized.
  void add_raw(std::string_view text, Before before) {
    if (parts_.marks) {
      text = keep(parts_.marks->normalized(text, before));
    } else if (parts_.composes) {
      text = keep(composed(text));
    }
    parts_.normalized.split(
        text, [&](std::string_view part) { add_text(part, before); },
        [&](int64_t token) {
          tokens_.push_back(token);
          before = Before::kNormalizedToken;
        });
  }

  /// What lies between all added tokens.
  void add_text(std::string_view text, Before before) {
    if (text.empty()) {
      return;
    }
    const auto add = [&](std::string_view word) { add_word(word); };
    if (!parts_.marks) {
      parts_.splitter->split(text, add);
      return;
    }
    if (parts_.marks->has_metaspace) {
      text = keep(parts_.marks->marked(text, before));
    }
    parts_.marks->divide(text, add);
  }

  /// Words come again and again.
  void add_word(std::string_view word) {
    const auto [found, is_new] = known_.try_emplace(word, tokens_.size(), 0);
    auto& [first, count] = found->second;
    if (!is_new) {
      for (size_t i = 0; i < count; ++i) {
        tokens_.push_back(tokens_[first + i]);
      }
      return;
    }
    const auto whole = parts_.whole_words ? parts_.tokens.find(word) : parts_.tokens.end();
    if (whole != parts_.tokens.end()) {
      tokens_.push_back(whole->second);
    } else {
      parts_.bpe->append_tokens(word, tokens_);
    }
    count = tokens_.size() - first;
  }

  /// Keeps a text that `known_` points into.
  std::string_view keep(std::string text) {
    return texts_.emplace_back(std::move(text));
  }

  const Tokenizer::Parts& parts_;
  std::vector<int64_t> tokens_;
  /// Of each word where its tokens are in `tokens_`, and how many.
  std::unordered_map<std::string_view, std::pair<size_t, size_t>> known_;
  std::list<std::string> texts_;
};

} // namespace

std::vector<int64_t> Tokenizer::encode(std::string_view text, std::string_view before) const {
  const auto bad = first_not_utf8(text);
  check_config(!bad, "the text is not UTF-8 at byte ", bad.value_or(0));
  return Encoder(*parts_).encode(
      text, before.empty() ? Before::kNothing : before_next(*parts_, before));
}

const std::string& Tokenizer::folder() const {
  return parts_->folder;
}

const std::vector<int64_t>& Tokenizer::prefix() const {
  return parts_->prefix;
}

const std::vector<int64_t>& Tokenizer::suffix() const {
  return parts_->suffix;
}

const std::string& Tokenizer::bytes_of(int64_t token) const {
  check_config(has(token), "the tokenizer has no token ", token);
  return parts_->bytes[static_cast<size_t>(token)];
}

bool Tokenizer::has(int64_t token) const {
  return token >= 0 && token < vocab() && !parts_->bytes[static_cast<size_t>(token)].empty();
}

bool Tokenizer::is_special(int64_t token) const {
  return parts_->special.contains(token);
}

std::optional<int64_t> Tokenizer::find(std::string_view bytes) const {
  for (const auto* tokens : {&parts_->added, &parts_->tokens}) {
    const auto found = tokens->find(bytes);
    if (found != tokens->end()) {
      return found->second;
    }
  }
  return std::nullopt;
}

// Note [Where a text can be cut]
// After a line end, if no token goes over it.
// - Byte-level BPE: if no whitespace follows. The patterns of GPT-2, Llama 3 and Qwen take no line
//   end together with such a character, and NFC joins no character to a line end. GPT-2's pattern
//   divides a run of whitespace before a word in another way than one at the end of a text, so
//   there the line end must follow a word. If the tokenizer has another pattern, or an added token
//   with a line end inside, a text stays whole.
// - SentencePiece: if no merge joins the line end to the character that follows, and no added token
//   has both. `no_cut_before` says for which first bytes of a character one does. With
//   `ignore_merges` a text stays whole.
std::vector<std::string_view> Tokenizer::cut(std::string_view text, size_t size) const {
  const auto is_place = [&](size_t line_end) {
    if (parts_->marks) {
      return !parts_->no_cut_before[static_cast<unsigned char>(text[line_end + 1])];
    }
    const bool after_word = !is_space(text, line_end - 1);
    return !is_space(text, line_end + 1) && (after_word || !parts_->cuts_after_words);
  };
  std::vector<std::string_view> result;
  size_t from = size; // no line end before this position
  while (parts_->can_cut && text.size() > size) {
    const auto line_end = text.find('\n', std::max<size_t>(from, 1));
    if (line_end == std::string_view::npos || line_end + 1 == text.size()) {
      break;
    }
    if (is_place(line_end)) {
      result.push_back(text.substr(0, line_end + 1));
      text.remove_prefix(line_end + 1);
      from = size;
    } else {
      from = line_end + 1;
    }
  }
  result.push_back(text);
  return result;
}

int64_t Tokenizer::vocab() const {
  return static_cast<int64_t>(parts_->bytes.size());
}

} // namespace fsdp::cli
