#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/text/tokenizer.h"

namespace fsdp::cli {

/// How files of text become tokens.
struct DocumentOptions {
  /// What errors begin with.
  std::string about;
  /// The field of each line of a .jsonl file that holds the text.
  std::string field = "text";
  /// The token after each document, if there is one. It is not put after itself.
  std::optional<int64_t> end;
};

/// What was read.
struct DocumentCounts {
  int64_t documents = 0;
  int64_t bytes = 0;
  int64_t tokens = 0;
};

/// Calls `write` with the tokens of all documents in their order. Each line of a .jsonl file is a
/// document; any other file is one. A document begins and ends with what the template of the
/// tokenizer says. Uses all cores, and holds only a part of the tokens at a time, unless a text
/// cannot be cut (see `Tokenizer::cut`). Throws ConfigError that names the file, and the line or
/// the byte, if a file is not what it should be.
DocumentCounts tokenize_documents(
    const Tokenizer& tokenizer,
    const std::vector<std::string>& paths,
    const DocumentOptions& options,
    const std::function<void(const std::vector<int64_t>& tokens)>& write);

/// The text of a special token, such as "eos_token", as tokenizer_config.json of the folder says.
std::optional<std::string> special_text(const std::string& folder, const std::string& name);

/// The token that ends a document, as tokenizer_config.json of the folder says. Nothing if it does
/// not say it.
std::optional<int64_t> end_token(const Tokenizer& tokenizer, const std::string& folder);

/// The token of --document-end: a number, or that of "eos", which is the `end_token` of a model's
/// folder. Throws ConfigError if it is none of the model's `vocab` tokens.
int64_t document_end_token(const std::string& text, const std::string& folder, int64_t vocab);

} // namespace fsdp::cli
