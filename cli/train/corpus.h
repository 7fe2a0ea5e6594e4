#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/text/documents.h"
#include "cli/train/token_source.h"

namespace fsdp::cli {

/// What decides the rows of a batch.
struct BatchOf {
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t rows = 0; // of all ranks together
  int64_t context = 0;
};

/// How data become tokens.
struct TokensOf {
  int64_t vocab = 256; // tokens must be below it
  /// How files of tokens without a header store one.
  TokenType raw = TokenType::uint16;
  /// For text. None: each byte is a token.
  std::optional<Tokenizer> tokenizer = {};
  DocumentOptions documents = {}; // of text, with a tokenizer
  int64_t context = 128;          // of the rows into which examples are put
};

/// A text, or files of tokens. Most of it is for training, and a part is held out. It
/// never changes, so that ranks that are threads can share it.
///
/// Note [Held-out text]
/// The text is cut into at least 20 equal blocks of at most 64 Ki tokens. Every twentieth block is
/// held out. The held-out blocks come from all over the text and are the same for every seed and
/// model. Of examples, each row is a block; if there are fewer than 20, the last is held out.
class Corpus {
 public:
  /// Reads a file of text, or all text files below a folder in the order of their names. Leaves out
  /// hidden files, files that contain a zero byte, because they are not text, and the folders of
  /// runs. Opens a file of tokens, or all that a pattern such as "part_*.bin" finds, in the order
  /// of their names; see `open_token_files`. Throws ConfigError with a message that names --data.
  static Corpus read(const std::string& path, const TokensOf& tokens = {});
  /// Whether --data is text, not files of tokens.
  static bool is_text(const std::string& path);
  /// The C++ headers of the LibTorch that this process has loaded. If they are not there, those of
  /// the LibTorch that the tool was built with.
  static Corpus libtorch_headers(const TokensOf& tokens = {});

  explicit Corpus(std::string text, std::string name = "text", int64_t num_files = 1);
  /// `row`: the tokens are rows of this length, which are never cut; 0: they are not.
  Corpus(std::shared_ptr<TokenSource> tokens, std::string name, int64_t num_files, int64_t row = 0);

  /// Whether bytes are the tokens.
  bool is_bytes() const {
    return is_bytes_;
  }
  /// "bytes" or "tokens".
  const char* unit() const {
    return is_bytes() ? "bytes" : "tokens";
  }

  const std::string& name() const {
    return name_;
  }
  int64_t num_files() const {
    return num_files_;
  }
  /// How many tokens there are to train on, and how many are held out. In a text, bytes are tokens.
  int64_t num_train() const {
    return source_->size() - num_held_out_;
  }
  int64_t num_held_out() const {
    return num_held_out_;
  }

  /// A hash of the bytes, or of samples from other tokens. The same on every machine.
  std::string fingerprint() const;

  /// Throws ConfigError if there is too little text for rows of `context` tokens.
  void check_context(int64_t context) const;

  /// From now on, what comes behind this token begins another document: it carries `kBegins`, and
  /// `kIsGiven`, because nothing in its document comes before it. Not for examples.
  void separate_documents(int64_t end) {
    separator_ = end;
  }
  /// Whether tokens carry flags; see `kIsGiven`.
  bool has_flags() const {
    return row_ > 0 || separator_.has_value();
  }

  /// Rows [first, first + count) of a batch, as int64 of shape (count, context + 1). They depend
  /// only on the batch and the rows' numbers, so that batches are the same for any number of ranks.
  /// Rows of bytes begin anywhere. Other tokens are cut into rows, and each epoch has all of them,
  /// in another order. Rows of examples are never cut.
  torch::Tensor train_rows(const BatchOf& batch, int64_t first, int64_t count) const;

  /// Rows [first, first + count) of `total` rows that are spread evenly over the held-out text.
  torch::Tensor held_out_rows(int64_t first, int64_t count, int64_t total, int64_t context) const;

  /// All tokens, also those that are held out, as rows of `context` tokens and the one behind them:
  /// each token but the first is predicted once. The end of the last row is padding that is given.
  int64_t num_rows(int64_t context) const;
  torch::Tensor rows_of_all(int64_t first, int64_t count, int64_t context) const;

  /// A prompt for a sample: half a line of the held-out text. Only for bytes.
  std::string prompt() const;

  /// The loss on the held-out text of a model that only knows how frequent each token is in the
  /// training text. A useful model must have a lower loss. Takes samples, unless tokens are bytes.
  double frequency_loss() const;

 private:
  enum class Part : std::uint8_t { train, held_out };

  int64_t size_of(Part part) const {
    return part == Part::train ? num_train() : num_held_out();
  }
  /// Sets the flags of tokens that begin a document inside of a row.
  void mark_documents(torch::Tensor& rows) const;
  /// Copies tokens [start, start + count) of a part.
  void read_part(Part part, int64_t start, int64_t count, int64_t* out) const;
  /// Calls `visit(tokens)` with stretches of a part, up to `most` tokens that are spread over it.
  void sample(
      Part part,
      int64_t most,
      const std::function<void(const std::vector<int64_t>& tokens)>& visit) const;
  /// How often each token is in a part, or in samples of it.
  std::vector<double> count_tokens(Part part) const;
  std::string held_out_text() const;

  std::string name_;
  int64_t num_files_;
  std::shared_ptr<const TokenSource> source_;
  bool is_bytes_ = false;
  int64_t row_ = 0;
  std::optional<int64_t> separator_;
  int64_t block_ = 1;           // tokens
  int64_t held_out_every_ = 20; // blocks
  int64_t num_held_out_ = 0;
};

} // namespace fsdp::cli
