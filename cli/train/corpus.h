#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cli/train/data_set.h"
#include "cli/train/data_set_reader.h"

namespace fsdp::cli {

/// What a run is trained on: one data set, or several with weights. It never changes, so that ranks
/// that are threads can share it.
///
/// Note [Weights of data sets]
/// Rows are drawn in turns of 10,000. In each turn a data set has its share of the rows, rounded.
/// Whose row is next looks random, and each data set goes through its rows in its own order. So
/// what a row is follows from its number alone: a run on any number of ranks sees the same rows,
/// and one that is resumed goes on at the next.
class Corpus {
 public:
  /// Reads what `read_data_set` reads. Of a .json file with weights by such paths, reads all these.
  /// Throws ConfigError with a message that names --data.
  static Corpus read(const std::string& path, const TokensOf& tokens = {});
  /// Whether some of --data is text, not files of tokens.
  static bool is_text(const std::string& path);
  static Corpus libtorch_headers(const TokensOf& tokens = {}) {
    return Corpus(read_libtorch_headers(tokens));
  }

  explicit Corpus(std::string text, std::string name = "text");
  explicit Corpus(DataSet data);

  /// Whether bytes are the tokens.
  bool is_bytes() const {
    return sets_[0].data.is_bytes();
  }
  /// "bytes" or "tokens".
  const char* unit() const {
    return sets_[0].data.unit();
  }

  const std::string& name() const {
    return name_;
  }
  int64_t num_files() const;
  /// How many tokens there are to train on, and how many are held out. In a text, bytes are tokens.
  int64_t num_train() const;
  int64_t num_held_out() const;
  /// The data sets and the parts of the rows that they have: "70 % a.bin, 30 % b.bin". Empty if
  /// there is one.
  std::string shares() const;

  /// A hash of all data sets and their weights. The same on every machine.
  std::string fingerprint() const;

  /// Throws ConfigError if there is too little text for rows of `context` tokens.
  void check_context(int64_t context) const;

  /// See DataSet.
  void separate_documents(int64_t end);
  /// The same for --document-end, see `document_end_token`. Throws ConfigError for examples.
  void separate_documents(const std::string& end, const std::string& folder, int64_t vocab);
  bool has_flags() const;

  // Rows are int64 of shape (count, context + 1).

  /// Rows [first, first + count) of a batch. They depend only on the batch and the rows' numbers,
  /// so that batches are the same for any number of ranks.
  torch::Tensor train_rows(const BatchOf& batch, int64_t first, int64_t count) const;

  /// Rows [first, first + count) of `total` rows that are spread evenly over the held-out text of
  /// each data set, which has its share of them.
  torch::Tensor held_out_rows(int64_t first, int64_t count, int64_t total, int64_t context) const;

  /// All tokens of all data sets, one after another. Beyond the last row there is only padding that
  /// is given.
  int64_t num_rows(int64_t context) const;
  torch::Tensor rows_of_all(int64_t first, int64_t count, int64_t context) const;

  /// A prompt for a sample: half a line of the held-out text. Only for bytes.
  std::string prompt() const;

  /// The loss on the held-out text of a model that only knows how frequent each token is in the
  /// training text. A useful model must have a lower loss. Takes samples, unless tokens are bytes.
  double frequency_loss() const;

 private:
  struct Weighted {
    DataSet data;
    double share = 1; // all together are 1
  };
  Corpus(std::vector<Weighted> sets, std::string name);

  /// How many of `total` rows each data set has, at least one of each.
  std::vector<int64_t> divided(int64_t total) const;
  /// A row that is trained on: its data set, and its number among all rows of that one.
  struct Drawn {
    size_t set = 0;
    int64_t number = 0;
  };
  struct Turn {
    int64_t number = 0;
    std::vector<Drawn> rows;
  };
  Turn make_turn(int64_t number, uint64_t seed) const;
  /// How frequent each token is in a part.
  std::vector<double> frequencies(DataSet::Part part) const;

  double count_frequency_loss() const;

  std::vector<Weighted> sets_;
  std::string name_;
  /// Is counted when it is first asked for: that goes through much of the text.
  struct FrequencyLoss {
    std::once_flag once;
    double value = 0;
  };
  std::shared_ptr<FrequencyLoss> frequency_loss_ = std::make_shared<FrequencyLoss>();
};

} // namespace fsdp::cli
