#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cli/text/tokenizer.h"
#include "cli/train/model.h"
#include "cli/train/run_checkpoint.h"

namespace fsdp::cli {

/// A trained model, before its weights are loaded, and what its tokens mean.
struct LanguageModel {
  ModelDims dims;
  std::optional<Tokenizer> tokenizer; // none: tokens are bytes, or nobody knows
  int64_t longest = 0;                // the most tokens that it sees
  std::set<int64_t> ends;             // the tokens that end an answer
  std::optional<int64_t> end;         // the token after each document
  std::string folder;                 // of Hugging Face, with weights
  std::optional<SavedRun> run;        // with the other weights, or all
  std::string adapter;                // a folder of PEFT with the other weights

  /// Fills a model, sharded or not. Collective over the world.
  void load(Transformer& model) const;

  /// The tokens of a text, which begins with what the template of the tokenizer says. Throws
  /// ConfigError if the model lacks one of them.
  std::vector<int64_t> encode(std::string_view text) const;
  std::string bytes_of(int64_t token) const;
  /// Of each token of the model (vocab) whether it stands for no text.
  torch::Tensor meaningless() const;
};

/// Finds a Hugging Face folder, a run's folder or a checkpoint. `tokenizer`: a folder with a
/// tokenizer.json, or "bytes"; empty: that of the model. Throws ConfigError that names --checkpoint
/// if there is no model, and if its tokenizer cannot be read, unless that is not `needed`.
LanguageModel find_language_model(
    const std::string& path, const std::string& tokenizer, bool needed = true);

/// The whole model on the CPU, with its weights. Needs a process group.
Transformer load_whole(const LanguageModel& language, c10::ScalarType dtype);

} // namespace fsdp::cli
