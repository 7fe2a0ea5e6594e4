#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::cli {

/// Turns text into tokens, as the tokenizer.json of a Hugging Face folder says. It must be
/// byte-level BPE, as GPT-2, Llama 3 and Qwen have it, or the BPE of SentencePiece with
/// `byte_fallback`, as Llama 2, Mistral and Gemma have it. It never changes, so threads can share
/// it. `TokenText` is the way back.
class Tokenizer {
 public:
  struct Parts; // of tokenizer.json

  /// Reads FOLDER/tokenizer.json. Throws ConfigError that names the file and the field if it cannot
  /// be read, or asks for anything that is not done here.
  static Tokenizer read(const std::string& folder);
  /// Whether the folder has a tokenizer.json.
  static bool is_in(const std::string& folder);

  /// The tokens of a text, without those of the template. If it is a later part of a text, `before`
  /// is what lies before it: a tokenizer may put a space before the first part only. No token goes
  /// over the border. Throws ConfigError that names the position of the byte if the text is not
  /// UTF-8.
  std::vector<int64_t> encode(std::string_view text, std::string_view before = {}) const;
  /// The folder that it was read from.
  const std::string& folder() const;
  /// What the template of the tokenizer puts before and after a text.
  const std::vector<int64_t>& prefix() const;
  const std::vector<int64_t>& suffix() const;

  /// The bytes of a token inside of a text: not always whole characters. Throws ConfigError if
  /// there is no such token.
  const std::string& bytes_of(int64_t token) const;
  /// Whether there is such a token.
  bool has(int64_t token) const;
  /// Whether it is a special token, which is no part of ordinary text.
  bool is_special(int64_t token) const;
  /// The token that stands for these bytes, if there is one. Added tokens come first. If the
  /// vocabulary has marks for spaces, the bytes are those in tokenizer.json.
  std::optional<int64_t> find(std::string_view bytes) const;
  /// Cuts a text at line ends, into parts of about `size` bytes. The tokens of the parts, one after
  /// another, are those of the whole text, if `encode` gets with each part the one before it. See
  /// Note [Where a text can be cut].
  std::vector<std::string_view> cut(std::string_view text, size_t size) const;
  /// The largest token, plus one.
  int64_t vocab() const;

 private:
  friend class TokenText;
  explicit Tokenizer(std::shared_ptr<const Parts> parts) : parts_(std::move(parts)) {}

  std::shared_ptr<const Parts> parts_;
};

} // namespace fsdp::cli
