#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::cli {

// A token may carry these flags besides its number, which is below 2^28.
inline constexpr int64_t kTokenNumber = (int64_t{1} << 28) - 1;
inline constexpr int64_t kIsGiven = int64_t{1} << 28; // the model need not predict it
/// Attention does not go back from here: a document or an example begins.
inline constexpr int64_t kBegins = int64_t{1} << 29;

/// A long sequence of tokens that never changes. Threads may read it at the same time.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual int64_t size() const = 0;
  /// Copies tokens [start, start + count) to `out`.
  virtual void read(int64_t start, int64_t count, int64_t* out) const = 0;
};

/// Each byte of a text is a token.
class TextSource : public TokenSource {
 public:
  explicit TextSource(std::string text) : text_(std::move(text)) {}
  int64_t size() const override {
    return std::ssize(text_);
  }
  void read(int64_t start, int64_t count, int64_t* out) const override;

 private:
  const std::string text_;
};

/// Tokens in memory.
class TokenList : public TokenSource {
 public:
  explicit TokenList(std::vector<int32_t> tokens) : tokens_(std::move(tokens)) {}
  int64_t size() const override {
    return std::ssize(tokens_);
  }
  void read(int64_t start, int64_t count, int64_t* out) const override {
    std::copy_n(tokens_.begin() + start, count, out);
  }

 private:
  const std::vector<int32_t> tokens_;
};

/// How a file stores a token.
enum class TokenType : std::uint8_t { uint8, uint16, uint32, int32, int64 };

/// What --token-dtype means: "uint16", "uint32", or "auto" (nothing).
std::optional<TokenType> raw_type(const std::string& name);

/// Returns true for the name of a file of tokens: .bin or .npy.
bool is_token_file(const std::string& path);

/// Tokens in files, one file after another. The files are mapped into memory, so opening them takes
/// no time. They may be
/// - .bin of llm.c, with a header;
/// - .bin of Megatron, with an .idx beside it;
/// - .npy with one axis of integers;
/// - .bin without any of this, as nanoGPT writes it: `raw` integers. Without `raw` they are uint16,
///   or uint32 for a vocabulary that 16 bits cannot hold.
/// Throws ConfigError that names --data and the file if a file is none of these or is cut off, or
/// if it looks like uint32 where `raw` does not say uint16. A token that is not below `vocab`
/// throws when it is read; the error names the file, the position and the token.
std::shared_ptr<TokenSource> open_token_files(
    const std::vector<std::string>& paths, std::optional<TokenType> raw, int64_t vocab);

} // namespace fsdp::cli
