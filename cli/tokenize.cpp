// `fsdp tokenize`: turns text into a file of tokens, for `fsdp train --data`.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/files.h"
#include "cli/text/documents.h"
#include "cli/train/progress.h"

namespace fsdp::cli {

namespace {

struct TokenizeOptions {
  std::vector<std::string> files;
  std::string tokenizer;
  std::string out;
  std::string field = "text";
  std::string end;
};

/// A new file of tokens: .npy, or .bin without a header. It has its final name only when it is
/// whole, and is removed if an error comes before.
class TokenFile {
 public:
  TokenFile(const std::string& path, int64_t vocab)
      : path_(path),
        is_npy_(path.ends_with(".npy")),
        bytes_(vocab <= 1 << 16 ? 2 : 4),
        unfinished_(path + ".unfinished." + std::to_string(getpid())) {
    check_config(
        is_npy_ || path.ends_with(".bin"), "--out ", path, ": the name must end in .bin or .npy");
    check_config(access(path.c_str(), F_OK) != 0, path, " exists already; choose another name");
    file_.open(unfinished_, std::ios::binary | std::ios::trunc);
    write_header();
  }
  ~TokenFile() {
    unlink(unfinished_.c_str());
  }
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  void write(const std::vector<int64_t>& tokens) {
    std::string buffer;
    buffer.reserve(tokens.size() * static_cast<size_t>(bytes_));
    for (const auto token : tokens) {
      for (int byte = 0; byte < bytes_; ++byte) {
        buffer += static_cast<char>(token >> (8 * byte));
      }
    }
    count_ += std::ssize(tokens);
    file_.write(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    check_written();
  }

  void finish() {
    file_.seekp(0);
    write_header(); // the number of tokens is known now
    file_.close();
    check_written();
    if (std::rename(unfinished_.c_str(), path_.c_str()) != 0) {
      throw_cannot_write(path_);
    }
  }

 private:
  /// The header of version 1.0, as NumPy describes it. It always has the same size.
  void write_header() {
    if (is_npy_) {
      auto text = c10::str(
          "{'descr': '<u", bytes_, "', 'fortran_order': False, 'shape': (", count_, ",), }");
      text.resize(117, ' ');
      const char size[] = {118, 0};
      file_ << "\x93NUMPY" << '\x01' << '\0' << std::string(size, 2) << text << '\n';
    }
    check_written();
  }

  void check_written() {
    if (!file_) {
      throw_cannot_write(path_);
    }
  }

  const std::string path_;
  const bool is_npy_;
  const int bytes_; // of each token
  const std::string unfinished_;
  std::ofstream file_;
  int64_t count_ = 0;
};

/// The token that --end asks for.
std::optional<int64_t> end_of(const TokenizeOptions& options, const Tokenizer& tokenizer) {
  if (options.end == "none") {
    return std::nullopt;
  }
  const auto token =
      options.end.empty() ? end_token(tokenizer, options.tokenizer) : tokenizer.find(options.end);
  check_config(
      token.has_value() || options.end.empty(), "--end ", options.end,
      ": the tokenizer has no such token");
  check_config(
      token.has_value(), "tokenizer_config.json of ", options.tokenizer,
      " names no eos_token of the tokenizer; --end names the token after each document, or none");
  return token;
}

int tokenize(const TokenizeOptions& options) {
  const auto tokenizer = Tokenizer::read(options.tokenizer);
  const auto end = end_of(options, tokenizer);
  TokenFile file(options.out, tokenizer.vocab());
  const auto start = std::chrono::steady_clock::now();
  const auto counts = tokenize_documents(
      tokenizer, options.files, {.field = options.field, .end = end},
      [&](const std::vector<int64_t>& tokens) { file.write(tokens); });
  check_config(counts.tokens > 0, "there is no text in the files");
  file.finish();
  const auto seconds = seconds_since(start);
  Screen screen;
  screen.labelled(
      "read", c10::str(
                  plural(std::ssize(options.files), "file"), ", ",
                  plural(counts.documents, "document"), ", ", decimal_count(counts.bytes, "B")));
  screen.labelled(
      "wrote",
      c10::str(
          printable(options.out), ": ", plural(counts.tokens, "token"), " below ",
          tokenizer.vocab(), " in ", fixed(seconds, 1), " s, ",
          decimal_count(static_cast<int64_t>(static_cast<double>(counts.bytes) / seconds), "B"),
          "/s"));
  return 0;
}

} // namespace

void add_tokenize(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("tokenize", "Turn text into a file of tokens, for train --data");
  auto options = std::make_shared<TokenizeOptions>();
  command
      ->add_option(
          "files", options->files,
          "Files of text, each one a document, or .jsonl with a document per line")
      ->required();
  command
      ->add_option(
          "--tokenizer", options->tokenizer, "A Hugging Face folder that has a tokenizer.json")
      ->required();
  command->add_option("--out", options->out, "File to write: .bin or .npy")->required();
  command->add_option("--field", options->field, "The field of a .jsonl line that holds the text")
      ->capture_default_str();
  command->add_option(
      "--end", options->end,
      "Token after each document, or none [eos_token of tokenizer_config.json]");
  command->callback([options, &action] { action = [options] { return tokenize(*options); }; });
}

} // namespace fsdp::cli
