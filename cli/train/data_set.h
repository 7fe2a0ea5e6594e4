#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/train/token_source.h"

namespace fsdp::cli {

/// What decides the rows of a batch.
struct BatchOf {
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t rows = 0; // of all ranks together
  int64_t context = 0;
};

/// Tokens from one source. Most are for training, and a part is held out.
///
/// Note [Held-out text]
/// The text is cut into at least 20 equal blocks of at most 64 Ki tokens. Every twentieth block is
/// held out. The held-out blocks come from all over the text and are the same for every seed and
/// model. Of examples, each row is a block; if there are fewer than 20, the last is held out.
class DataSet {
 public:
  /// The part for training, and the one that is held out.
  enum class Part : std::uint8_t { train, held_out };

  /// Each byte is a token.
  DataSet(std::string text, std::string name, int64_t num_files);
  /// `row`: the tokens are rows of this length, which are never cut; 0: they are not.
  DataSet(
      std::shared_ptr<TokenSource> tokens, std::string name, int64_t num_files, int64_t row = 0);

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
  int64_t size_of(Part part) const {
    return part == Part::train ? source_->size() - num_held_out_ : num_held_out_;
  }
  /// A hash of the bytes, or of samples from other tokens. The same on every machine.
  uint64_t fingerprint() const;
  /// Throws ConfigError if there is too little text for rows of `context` tokens.
  void check_context(int64_t context) const;

  /// From now on, what comes after this token begins another document: it carries `kBegins`, and
  /// `kIsGiven`, because nothing in its document comes before it. Not for examples.
  void separate_documents(int64_t end) {
    separator_ = end;
  }
  /// Whether tokens carry flags; see `kIsGiven`.
  bool has_flags() const {
    return row_ > 0 || separator_.has_value();
  }

  // Each of these copies a row of `context` + 1 tokens to `out`.

  /// Row `row` of a batch, which is the one with this number of all that are ever drawn from here.
  /// Rows of bytes begin anywhere. Other tokens are cut into rows, and each epoch has all of them,
  /// in another order.
  void train_row(const BatchOf& batch, int64_t row, int64_t number, int64_t* out) const;
  /// Row `number` of `total` rows that are spread evenly over the held-out text.
  void held_out_row(int64_t number, int64_t total, int64_t context, int64_t* out) const;
  /// Row `number` of all tokens, also those that are held out: each token but the first is
  /// predicted once. The end of the last row is padding that is given.
  void row_of_all(int64_t number, int64_t context, int64_t* out) const;
  int64_t num_rows(int64_t context) const;

  /// Calls `visit(tokens)` with stretches of a part, up to `most` tokens that are spread over it.
  void sample(
      Part part,
      int64_t most,
      const std::function<void(const std::vector<int64_t>& tokens)>& visit) const;
  /// How often each token is in a part, or in samples of it.
  std::vector<double> count_tokens(Part part) const;
  /// All of the held-out part. Only for bytes.
  std::string held_out_text() const;

 private:
  /// Copies tokens [start, start + count) of a part.
  void read_part(Part part, int64_t start, int64_t count, int64_t* out) const;
  /// Sets the flags of tokens that begin a document inside of a row.
  void mark_documents(int64_t* row, int64_t context) const;

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

/// Puts [0, size) into an order that looks random: returns what comes at `index`.
int64_t permuted(int64_t index, int64_t size, uint64_t key);

} // namespace fsdp::cli
