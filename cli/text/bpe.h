#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fsdp::cli {

/// Byte-pair encoding: joins the bytes or characters of a word to tokens, the most frequent pairs
/// first.
class Bpe {
 public:
  /// `bytes` has the token of each byte.
  explicit Bpe(const std::array<int64_t, 256>& bytes) : bytes_(bytes) {}

  /// A character that is a token. A word begins with these, and with the bytes of all other
  /// characters. If none is added, it begins with bytes only.
  void add_character(std::string_view character, int64_t token);

  /// Two tokens become one. A merge that was added earlier comes first. If the same two tokens are
  /// added again, only the last time counts, as in the package tokenizers.
  void add_merge(int64_t left, int64_t right, int64_t merged);

  /// Appends the tokens of a word. Takes n log n steps for a word of n bytes.
  void append_tokens(std::string_view word, std::vector<int64_t>& tokens) const;

 private:
  struct Merge {
    int64_t rank;
    int64_t token;
  };
  /// Null if the two are not merged.
  const Merge* find(int64_t left, int64_t right) const;
  /// The tokens with which a word begins.
  std::vector<int64_t> first_tokens(std::string_view word) const;

  std::array<int64_t, 256> bytes_;
  std::unordered_map<uint32_t, int64_t> characters_; // by their bytes, at most four
  std::unordered_map<uint64_t, Merge> merges_;       // by both tokens, of 32 bits each
  int64_t num_added_ = 0;                            // merges, the same one twice included
};

} // namespace fsdp::cli
