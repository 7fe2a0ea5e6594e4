#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/text/tokenizer.h"

namespace fsdp::cli {

/// A prompt and an answer, or a conversation.
struct Example {
  std::vector<int64_t> tokens;
  std::vector<bool> learned; // of each token: answers are learned, and what is given is not
  int64_t line = 0;          // of the file; 1 is the first
};

/// Whether a file is .jsonl whose first line is an example, not a document with a "text".
bool holds_examples(const std::string& path);

/// Reads the examples of a .jsonl file, one per line:
/// - {"prompt": "...", "completion": "..."}: the completion and `end` after it are learned;
/// - {"messages": [{"role": "...", "content": "..."}, ...]}: what the role "assistant" says is
///   learned, and the token that ends its turn. `find_chat_form` says how they are written. Nothing
///   is added, such as a system prompt.
/// Throws ConfigError that names --data, the file and the line if a line is anything else.
std::vector<Example> read_examples(
    const Tokenizer& tokenizer, const std::string& path, std::optional<int64_t> end);

} // namespace fsdp::cli
