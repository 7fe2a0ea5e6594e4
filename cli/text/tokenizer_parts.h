#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cli/text/bpe.h"
#include "cli/text/splitter.h"
#include "cli/text/tokenizer.h"

namespace fsdp::cli {

/// Lets std::unordered_map look for a std::string_view.
struct TextHash : std::hash<std::string_view> {
  using is_transparent = void;
};
using TokenOf = std::unordered_map<std::string, int64_t, TextHash, std::equal_to<>>;

/// Finds the texts of added tokens, such as <|im_start|>, inside of a text.
class AddedTokens {
 public:
  void add(const std::string& text, int64_t token) {
    tokens_[text] = token;
    lengths_[static_cast<unsigned char>(text[0])].insert(text.size());
  }

  /// Calls `on_text` with what lies between added tokens, and `on_token` with each of them.
  template <class OnText, class OnToken>
  void split(std::string_view text, const OnText& on_text, const OnToken& on_token) const {
    size_t done = 0;
    for (size_t at = 0; at < text.size();) {
      const auto found = find(text.substr(at));
      if (found == tokens_.end()) {
        ++at;
        continue;
      }
      on_text(text.substr(done, at - done));
      on_token(found->second);
      at += found->first.size();
      done = at;
    }
    on_text(text.substr(done));
  }

 private:
  /// The one with which the text begins. Of several, the longest is meant.
  TokenOf::const_iterator find(std::string_view text) const {
    for (const auto length : lengths_[static_cast<unsigned char>(text[0])]) {
      const auto found = tokens_.find(text.substr(0, length));
      if (found != tokens_.end()) {
        return found;
      }
    }
    return tokens_.end();
  }

  TokenOf tokens_;
  /// The lengths of those that begin with each byte.
  std::array<std::set<size_t, std::greater<>>, 256> lengths_;
};

/// What tokenizer.json says.
struct Tokenizer::Parts {
  std::string folder;
  std::vector<std::string> bytes; // of each token; empty: there is no such token
  TokenOf tokens;                 // of the vocabulary
  TokenOf added;                  // by their text
  std::set<int64_t> special;      // of the added ones
  bool whole_words = false;       // a word in the vocabulary is one token, whatever merges say
  AddedTokens raw;                // are found before the text is normalized
  AddedTokens normalized;         // are found afterwards
  bool composes = false;          // NFC
  bool can_cut = false;           // see Note [Where a text can be cut]
  bool cuts_after_words = false;  // only there
  std::optional<Splitter> splitter;
  std::optional<Bpe> bpe;
  std::vector<int64_t> prefix;
  std::vector<int64_t> suffix;

  void set_bytes(int64_t token, const std::string& text) {
    bytes.resize(std::max(bytes.size(), static_cast<size_t>(token) + 1));
    bytes[static_cast<size_t>(token)] = text;
  }
};

} // namespace fsdp::cli
