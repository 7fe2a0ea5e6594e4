#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>

namespace fsdp::cli {

/// A text as bytes. Most of it is for training, and a part is held out. The text never changes, so
/// that ranks that are threads can share it.
///
/// Note [Held-out text]
/// The text is cut into at least 20 equal blocks of at most 64 KiB. Every twentieth block is held
/// out. The held-out blocks come from all over the text and are the same for every seed and model.
class Corpus {
 public:
  /// Reads a file, or all text files below a folder in the order of their names. Leaves out hidden
  /// files, files that contain a zero byte, because they are not text, and the folders of runs.
  /// Throws ConfigError with a message that names --data.
  static Corpus read(const std::string& path);
  /// The C++ headers of the LibTorch that this process has loaded. If they are not there, those of
  /// the LibTorch that the tool was built with.
  static Corpus libtorch_headers();

  explicit Corpus(const std::string& text, std::string name = "text", int64_t num_files = 1);

  const std::string& name() const {
    return name_;
  }
  int64_t num_files() const {
    return num_files_;
  }
  int64_t train_bytes() const {
    return static_cast<int64_t>(train_.size());
  }
  int64_t held_out_bytes() const {
    return static_cast<int64_t>(held_out_.size());
  }

  /// A hash of the text, the same on every machine.
  std::string fingerprint() const;

  /// Throws ConfigError if there is too little text for rows of `context` bytes.
  void check_context(int64_t context) const;

  /// Rows [first, first + count) of the batch of `step`, as int64 of shape (count, context + 1).
  /// Each row depends only on seed, step and the row's number, so that the batches are the same for
  /// any number of ranks.
  torch::Tensor train_rows(
      uint64_t seed, int64_t step, int64_t first, int64_t count, int64_t context) const;

  /// Rows [first, first + count) of `total` rows that are spread evenly over the held-out text.
  torch::Tensor held_out_rows(int64_t first, int64_t count, int64_t total, int64_t context) const;

  /// A prompt for a sample: half a line of the held-out text.
  std::string prompt() const;

  /// The loss on the held-out text of a model that only knows how frequent each byte is in the
  /// training text. A useful model must have a lower loss.
  double byte_frequency_loss() const;

 private:
  std::string name_;
  int64_t num_files_;
  std::string train_;
  std::string held_out_;
};

} // namespace fsdp::cli
