#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>

namespace fsdp::cli {

/// Text as bytes: most of it to train on, and a part that is held out. It is
/// not changed after it was made, so that ranks as threads share one.
///
/// Note [Held-out text]
/// The text is cut into equal blocks of at most 64 KiB, at least 20 of them, and
/// every twentieth is held out: a twentieth of the text, from all over it, the
/// same for every seed and model.
class Corpus {
 public:
  /// Reads a file, or all text below a folder in the order of the names; hidden
  /// files, files with zero bytes, which are no text, and what runs of the tool have
  /// left there are not in it. Throws ConfigError that names --data.
  static Corpus read(const std::string& path);
  /// The C++ headers that came with the LibTorch this process runs on, else
  /// those it was built with.
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

  /// Differs for another text, on any machine.
  std::string fingerprint() const;

  /// Throws ConfigError where there is too little text for rows of `context`.
  void check_context(int64_t context) const;

  /// Rows [first, first + count) of the batch of `step`: (count, context + 1)
  /// int64. Each row depends on seed, step and its number alone, so that any
  /// number of ranks sees the same batches.
  torch::Tensor train_rows(
      uint64_t seed, int64_t step, int64_t first, int64_t count, int64_t context) const;

  /// Rows [first, first + count) of `total` that lie evenly in the held-out text.
  torch::Tensor held_out_rows(int64_t first, int64_t count, int64_t total, int64_t context) const;

  /// Something to go on from: half a line of the held-out text.
  std::string prompt() const;

  /// The loss on the held-out text of knowing only how frequent each byte is in
  /// the other: what any model must beat.
  double byte_frequency_loss() const;

 private:
  std::string name_;
  int64_t num_files_;
  std::string train_;
  std::string held_out_;
};

} // namespace fsdp::cli
