#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fsdp::cli {

/// Byte-pair encoding: joins the bytes of a word to tokens, the most frequent pairs first.
class Bpe {
 public:
  /// `bytes` has the token of each byte.
  explicit Bpe(const std::array<int64_t, 256>& bytes) : bytes_(bytes) {}

  /// Two tokens become one. A merge that was added earlier comes first.
  void add_merge(int64_t left, int64_t right, int64_t merged);

  /// Appends the tokens of a word.
  void append_tokens(std::string_view word, std::vector<int64_t>& tokens) const;

 private:
  struct Merge {
    int64_t rank;
    int64_t token;
  };
  /// Null if the two are not merged.
  const Merge* find(int64_t left, int64_t right) const;

  std::array<int64_t, 256> bytes_;
  std::unordered_map<uint64_t, Merge> merges_; // by both tokens, of 32 bits each
};

} // namespace fsdp::cli
