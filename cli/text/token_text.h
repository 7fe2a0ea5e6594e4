#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cli/text/tokenizer.h"

namespace fsdp::cli {

/// Turns tokens into text, one after another. The texts together are what the package tokenizers
/// makes of all tokens, special ones included. Where tokens are bytes that are no UTF-8, the text
/// of a byte-level tokenizer has these bytes; that of another one has U+FFFD, as the package says.
class TokenText {
 public:
  /// `begins`: whether the first token begins a text. Otherwise it continues one, and a space that
  /// stands only at the beginning of a text is not removed.
  TokenText(const Tokenizer& tokenizer, bool begins);

  /// The text that is certain with this token. A token of a single byte waits for a token that is
  /// none: then it is known whether all bytes between them are UTF-8.
  std::string add(int64_t token);
  /// The rest.
  std::string finish();

 private:
  struct State {
    std::string bytes; // that wait
    size_t left = 0;   // how often something may still be removed
  };
  /// Gives a piece to a step and to all after it. Appends what comes out to `text`.
  void pass(size_t step, std::string piece, std::string& text);
  void pass_bytes(size_t step, std::string& text);

  const Tokenizer tokenizer_;
  std::vector<State> states_; // of each step
};

} // namespace fsdp::cli
