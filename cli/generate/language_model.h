#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cli/text/tokenizer.h"
#include "cli/train/model.h"

namespace fsdp::cli {

/// A whole model, and what its tokens mean.
struct LanguageModel {
  Transformer model{nullptr};
  std::optional<Tokenizer> tokenizer; // none: tokens are bytes
  int64_t longest = 0;                // the most tokens that it sees
  std::set<int64_t> ends;             // the tokens that end a text

  std::vector<int64_t> encode(std::string_view text) const;
  std::string bytes_of(int64_t token) const;
  /// How many tokens mean something. The model may have scores of more.
  int64_t vocab() const;
};

/// Loads the weights only: from a Hugging Face folder, a run's folder or a checkpoint.
/// `tokenizer`: a folder with a tokenizer.json, or "bytes"; empty: that of the model. Throws
/// ConfigError that names --checkpoint if there is no model. Collective: needs a process group.
LanguageModel load_language_model(
    const std::string& path, const std::string& tokenizer, c10::ScalarType dtype);

} // namespace fsdp::cli
