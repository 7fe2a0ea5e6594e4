#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cli/text/documents.h"
#include "cli/train/data_set.h"

namespace fsdp::cli {

/// How data become tokens.
struct TokensOf {
  int64_t vocab = 256; // tokens must be below it
  /// How files of tokens without a header store one; see `open_token_files`.
  std::optional<TokenType> raw = {};
  /// For text. None: each byte is a token.
  std::optional<Tokenizer> tokenizer = {};
  DocumentOptions documents = {}; // of text, with a tokenizer
  bool needs_end = false;         // a token belongs after each document
  int64_t context = 128;          // of the rows into which examples are put
};

/// Reads a file of text, or all text files below a folder in the order of their names. Leaves out
/// hidden files, files that contain a zero byte, because they are not text, and the folders of
/// runs. Opens a file of tokens, or all that a pattern such as "part_*.bin" finds, in the order of
/// their names; see `open_token_files`. Throws ConfigError with a message that names --data.
DataSet read_data_set(const std::string& path, const TokensOf& tokens);

/// The C++ headers of the LibTorch that this process has loaded. If they are not there, those of
/// the LibTorch that the tool was built with.
DataSet read_libtorch_headers(const TokensOf& tokens);

/// Whether the path is of text, not of files of tokens.
bool is_text_path(const std::string& path);

} // namespace fsdp::cli
