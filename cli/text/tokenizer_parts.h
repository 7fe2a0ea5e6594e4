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
#include "cli/text/space_marks.h"
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
  /// Returns false if another token has this text.
  bool add(const std::string& text, int64_t token) {
    const auto [found, is_new] = tokens_.try_emplace(text, token);
    if (!is_new) {
      return found->second == token;
    }
    lengths_[static_cast<unsigned char>(text[0])].insert(text.size());
    return true;
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

/// One step of the decoder of SentencePiece's kind. It changes pieces of text one after another.
struct DecodeStep {
  enum class Kind {
    kSpaces,    // marks become spaces
    kBytes,     // tokens such as <0x0A> become bytes
    kStrip,     // removes `content` from the beginning, at most `count` times
    kMetaspace, // marks become spaces, and vanish in the first piece if `count` is 1
  };
  Kind kind = Kind::kSpaces;
  bool fused = false; // kStrip: of the text, not of each piece, because Fuse comes before it
  std::string content;
  size_t count = 0;
};

/// The byte that an entry of the vocabulary such as <0x0A> stands for.
std::optional<char> byte_of_entry(std::string_view entry);

/// What tokenizer.json says. There are two kinds of tokenizers: byte-level BPE, and the BPE of
/// SentencePiece with `byte_fallback`, whose vocabulary has characters and marks for spaces.
struct Tokenizer::Parts {
  std::string folder;
  std::vector<std::string> bytes; // of each token; empty: there is no such token
  TokenOf tokens;                 // of the vocabulary: by bytes, or by characters with marks
  TokenOf added;                  // by their text
  std::set<int64_t> special;      // of the added ones
  bool whole_words = false;       // a word in the vocabulary is one token, whatever merges say
  AddedTokens raw;                // are found before the text is normalized
  AddedTokens normalized;         // are found afterwards
  bool can_cut = false;           // see Note [Where a text can be cut]
  std::optional<Bpe> bpe;
  std::vector<int64_t> prefix;
  std::vector<int64_t> suffix;

  // Byte-level BPE:
  bool composes = false;         // NFC
  bool cuts_after_words = false; // only there; see the note
  std::optional<Splitter> splitter;

  // SentencePiece:
  std::optional<SpaceMarks> marks;       // none: the other kind
  std::array<bool, 256> no_cut_before{}; // bytes before which a line end does not cut; see the note
  std::vector<std::string> entries;      // what the decoder begins with, of each token
  std::vector<DecodeStep> decoder;

  void set_bytes(int64_t token, const std::string& text) {
    set(bytes, token, text);
  }
  void set_entry(int64_t token, const std::string& text) {
    set(entries, token, text);
  }

 private:
  static void set(std::vector<std::string>& texts, int64_t token, const std::string& text) {
    texts.resize(std::max(texts.size(), static_cast<size_t>(token) + 1));
    texts[static_cast<size_t>(token)] = text;
  }
};

} // namespace fsdp::cli
