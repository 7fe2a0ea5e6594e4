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

} // namespace

std::vector<int64_t> Tokenizer::encode(std::string_view text) const {
  const auto bad = first_not_utf8(text);
  check_config(!bad, "the text is not UTF-8 at byte ", bad.value_or(0));
  std::vector<int64_t> tokens;
  // Words come again and again: where the tokens of each one are, and how many.
  std::unordered_map<std::string_view, std::pair<size_t, size_t>> known;
  std::list<std::string> normalized; // what `known` points into
  const auto add_word = [&](std::string_view word) {
    const auto [found, is_new] = known.try_emplace(word, tokens.size(), 0);
    auto& [first, count] = found->second;
    if (!is_new) {
      for (size_t i = 0; i < count; ++i) {
        tokens.push_back(tokens[first + i]);
      }
      return;
    }
    const auto whole = parts_->whole_words ? parts_->tokens.find(word) : parts_->tokens.end();
    if (whole != parts_->tokens.end()) {
      tokens.push_back(whole->second);
    } else {
      parts_->bpe->append_tokens(word, tokens);
    }
    count = tokens.size() - first;
  };
  const auto add_token = [&](int64_t token) { tokens.push_back(token); };
  const auto add_text = [&](std::string_view part) { parts_->splitter->split(part, add_word); };
  const auto add_raw = [&](std::string_view part) {
    if (parts_->composes) {
      part = normalized.emplace_back(composed(part));
    }
    parts_->normalized.split(part, add_text, add_token);
  };
  parts_->raw.split(text, add_raw, add_token);
  return tokens;
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
// After a line end, if no whitespace follows. The patterns of GPT-2, Llama 3 and Qwen take no line
// end together with such a character, and NFC joins no character to a line end. GPT-2's pattern
// divides a run of whitespace before a word in another way than one at the end of a text, so there
// the line end must follow a word. If the tokenizer has another pattern, or an added token with a
// line end inside, a text stays whole.
std::vector<std::string_view> Tokenizer::cut(std::string_view text, size_t size) const {
  std::vector<std::string_view> result;
  size_t from = size; // no line end before this place
  while (parts_->can_cut && text.size() > size) {
    const auto line_end = text.find('\n', std::max<size_t>(from, 1));
    if (line_end == std::string_view::npos || line_end + 1 == text.size()) {
      break;
    }
    const bool after_word = !is_space(text, line_end - 1);
    if (!is_space(text, line_end + 1) && (after_word || !parts_->cuts_after_words)) {
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
