#include "cli/train/corpus.h"

#include <dlfcn.h>
#include <glob.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <utility>
#include <vector>

#include "cli/check.h"
#include "cli/files.h"
#include "cli/hash.h"
#include "cli/report/report.h"
#include "cli/text/examples.h"
#include "cli/train/packing.h"

namespace fsdp::cli {

namespace {

constexpr int64_t kLongestBlock = 64 << 10;

/// Returns true for a folder that `fsdp train` wrote. Such folders are not part of the text: it
/// would change with every run, and a resumed run needs the same text.
bool is_run_folder(const std::string& folder) {
  return is_file(folder + "/" + kMetricsFile) && is_file(folder + "/" + kConfigFile);
}

/// All files below `folder`, sorted by name, so that the order is the same on every machine.
std::vector<std::string> files_below(const std::string& folder) {
  std::vector<std::string> names;
  try {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      names.push_back(entry.path().filename().string());
    }
  } catch (const std::filesystem::filesystem_error& error) {
    throw_config_error("--data: ", folder, " cannot be listed: ", error.code().message());
  }
  std::sort(names.begin(), names.end());
  std::vector<std::string> files;
  for (const auto& name : names) {
    const auto path = folder + "/" + name;
    const bool is_link = std::filesystem::is_symlink(path); // links to folders may form a cycle
    if (name[0] == '.') {
      continue;
    }
    if (is_file(path)) {
      files.push_back(path);
    } else if (is_folder(path) && !is_link && !is_run_folder(path)) {
      const auto more = files_below(path);
      files.insert(files.end(), more.begin(), more.end());
    }
  }
  return files;
}

std::string read_text(const std::string& path) {
  auto text = read_file(path);
  check_config(text.has_value(), "--data: ", path, " cannot be read: ", std::strerror(errno));
  return std::move(*text);
}

/// Throws ConfigError if the model does not have the token.
int64_t checked_token(int64_t token, const std::string& name, const TokensOf& tokens) {
  check_config(
      token < tokens.vocab, "--data: ", name, " has the token ", token, " ('",
      tokens.tokenizer->bytes_of(token), "'), but the model has only ", tokens.vocab);
  return token;
}

/// The tokens of text files, each of which is a document or holds documents.
Corpus tokenize_files(
    const std::vector<std::string>& files, const std::string& name, const TokensOf& tokens) {
  std::vector<int32_t> all;
  tokenize_documents(
      *tokens.tokenizer, files, tokens.documents, [&](const std::vector<int64_t>& more) {
        for (const auto token : more) {
          all.push_back(static_cast<int32_t>(checked_token(token, name, tokens)));
        }
      });
  return Corpus(
      std::make_shared<TokenList>(std::move(all)), name, static_cast<int64_t>(files.size()));
}

/// All text below a folder: the files that are not empty and have no zero byte.
Corpus read_folder(const std::string& folder, const std::string& name, const TokensOf& tokens) {
  std::string text;
  std::vector<std::string> files;
  for (const auto& path : files_below(folder)) {
    const auto more = read_text(path);
    if (!more.empty() && more.find('\0') == std::string::npos) {
      files.push_back(path);
      text += tokens.tokenizer ? "" : more;
    }
  }
  check_config(
      !files.empty(), "--data: there is no text in ", folder, "; for files of tokens: --data '",
      folder, "/*.bin'");
  return tokens.tokenizer ? tokenize_files(files, name, tokens)
                          : Corpus(std::move(text), name, static_cast<int64_t>(files.size()));
}

Corpus read_packed(const std::string& path, const TokensOf& tokens) {
  check_config(
      tokens.tokenizer.has_value(), "--data: ", path,
      " holds examples, for which a tokenizer is needed; give a model with --from");
  const auto examples = read_examples(*tokens.tokenizer, path, tokens.documents.end);
  for (const auto& example : examples) {
    for (const auto token : example.tokens) {
      checked_token(token, path, tokens);
    }
  }
  return Corpus(
      std::make_shared<TokenList>(pack_examples(examples, path, tokens.context)), path,
      /*num_files=*/1, /*row=*/tokens.context + 1);
}

/// The include folder next to the lib folder of the loaded LibTorch. Empty if it is not known.
std::string loaded_headers() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&torch::autograd::grad), &info) == 0) {
    return "";
  }
  const auto library = real_path(info.dli_fname);
  const auto folder = library.substr(0, library.rfind('/'));
  return folder.substr(0, folder.rfind('/')) + "/include";
}

/// Puts [0, size) into an order that looks random: returns what comes at `index`. A Feistel network
/// permutes the next power of four; numbers beyond `size` are permuted again until one is inside.
int64_t permuted(int64_t index, int64_t size, uint64_t key) {
  int bits = 1; // of each half
  while ((int64_t{1} << (2 * bits)) < size) {
    ++bits;
  }
  const auto mask = (uint64_t{1} << bits) - 1;
  auto number = static_cast<uint64_t>(index);
  do {
    auto left = number >> bits;
    auto right = number & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      left = std::exchange(right, left ^ (splitmix64(key + 4 * right + round) & mask));
    }
    number = left << bits | right;
  } while (number >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(number);
}

/// The files that a pattern finds, in the order of their names.
std::vector<std::string> matching_files(const std::string& pattern) {
  glob_t found{};
  std::vector<std::string> files;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    files.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  }
  globfree(&found);
  check_config(!files.empty(), "--data: ", pattern, " finds no file");
  for (const auto& file : files) {
    check_config(
        is_token_file(file), "--data: ", pattern, " finds ", file,
        ", which is no file of tokens (.bin or .npy)");
  }
  return files;
}

bool is_pattern(const std::string& path) {
  return path.find_first_of("*?[") != std::string::npos;
}

constexpr int64_t kCheckedTokens = 1 << 26; // before the first step
constexpr int64_t kSampledTokens = 1 << 22; // to count them

} // namespace

bool Corpus::is_text(const std::string& path) {
  return !is_token_file(path) && (!is_pattern(path) || access(path.c_str(), F_OK) == 0);
}

Corpus Corpus::read(const std::string& path, const TokensOf& tokens) {
  const auto open_tokens = [&](const std::vector<std::string>& files) {
    Corpus corpus(
        open_token_files(files, tokens.raw, tokens.vocab), path,
        static_cast<int64_t>(files.size()));
    for (const auto part : {Part::train, Part::held_out}) {
      corpus.sample(part, kCheckedTokens, [](const auto&) {}); // reading checks them
    }
    return corpus;
  };
  if (is_pattern(path) && access(path.c_str(), F_OK) != 0) {
    return open_tokens(matching_files(path));
  }
  check_config(access(path.c_str(), F_OK) == 0, "--data: there is no file or folder ", path);
  if (is_folder(path)) {
    return read_folder(path, path, tokens);
  }
  check_config(is_file(path), "--data: ", path, " is neither a file nor a folder");
  return is_token_file(path)    ? open_tokens({path})
         : holds_examples(path) ? read_packed(path, tokens)
         : tokens.tokenizer     ? tokenize_files({path}, path, tokens)
                                : Corpus(read_text(path), path);
}

Corpus Corpus::libtorch_headers(const TokensOf& tokens) {
  for (const auto& folder : {loaded_headers(), std::string(FSDP_TORCH_INCLUDE)}) {
    if (is_folder(folder + "/ATen")) {
      return read_folder(folder, "LibTorch's C++ headers", tokens);
    }
  }
  throw_config_error(
      "LibTorch's headers, the default text, are neither in ", loaded_headers(), " nor in ",
      FSDP_TORCH_INCLUDE, "; give a text of your own with --data");
}

Corpus::Corpus(std::string text, std::string name, int64_t num_files)
    : Corpus(std::make_shared<TextSource>(std::move(text)), std::move(name), num_files) {
  is_bytes_ = true;
}

Corpus::Corpus(
    std::shared_ptr<TokenSource> tokens, std::string name, int64_t num_files, int64_t row)
    : name_(std::move(name)), num_files_(num_files), source_(std::move(tokens)), row_(row) {
  const auto size = source_->size();
  if (row > 0) {
    block_ = row;
    held_out_every_ = std::min(held_out_every_, size / row);
  } else {
    block_ = std::clamp<int64_t>(size / held_out_every_, 1, kLongestBlock);
  }
  for (auto start = (held_out_every_ - 1) * block_; start < size;
       start += held_out_every_ * block_) {
    num_held_out_ += std::min(block_, size - start);
  }
}

void Corpus::read_part(Part part, int64_t start, int64_t count, int64_t* out) const {
  while (count > 0) {
    const auto number = start / block_;
    // Of `held_out_every_` blocks, all but the last are for training.
    const auto block = part == Part::train ? number + number / (held_out_every_ - 1)
                                           : held_out_every_ * number + held_out_every_ - 1;
    const auto here = std::min(count, block_ - start % block_);
    source_->read(block * block_ + start % block_, here, out);
    start += here;
    count -= here;
    out += here;
  }
}

void Corpus::sample(
    Part part,
    int64_t most,
    const std::function<void(const std::vector<int64_t>& tokens)>& visit) const {
  constexpr int64_t kStretch = 1 << 12;
  const auto num_stretches = (size_of(part) + kStretch - 1) / kStretch;
  const auto wanted = std::max<int64_t>(1, (most + kStretch - 1) / kStretch);
  const auto step = std::max<int64_t>(1, (num_stretches + wanted - 1) / wanted);
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < num_stretches; i += step) {
    tokens.resize(static_cast<size_t>(std::min(kStretch, size_of(part) - i * kStretch)));
    read_part(part, i * kStretch, static_cast<int64_t>(tokens.size()), tokens.data());
    visit(tokens);
  }
}

std::string Corpus::fingerprint() const {
  uint64_t hash = 0;
  for (const auto part : {Part::train, Part::held_out}) {
    hash = splitmix64(hash ^ static_cast<uint64_t>(size_of(part)));
    const auto most = is_bytes() ? size_of(part) : kSampledTokens;
    const size_t in_word = is_bytes() ? 8 : 1; // tokens
    sample(part, most, [&](const std::vector<int64_t>& tokens) {
      for (size_t at = 0; at < tokens.size(); at += in_word) {
        uint64_t word = 0;
        for (size_t i = 0; i < in_word && at + i < tokens.size(); ++i) {
          word |= static_cast<uint64_t>(tokens[at + i]) << (8 * i);
        }
        hash = splitmix64(hash ^ word);
      }
    });
  }
  char hex[17];
  std::snprintf(hex, sizeof(hex), "%016llx", static_cast<unsigned long long>(hash));
  return hex;
}

void Corpus::check_context(int64_t context) const {
  const auto least = std::min(num_train(), num_held_out());
  check_config(
      row_ == 0 || least > 0, "--data: ", name_, " fills only one row of --context ", context,
      ", and one more is needed, to be held out; give more examples, or a smaller --context");
  check_config(
      least > 1, "--data: ", name_, " is too short: it has ", source_->size(), " ", unit(),
      ", and --context ", context, " needs about ", held_out_every_ * (context + 1));
  check_config(
      least > context, "--context ", context, ": ", name_, " has too little text for it (",
      num_train(), " ", unit(), " to train on, ", num_held_out(),
      " held out); give more with --data, or a --context below ", least);
}

torch::Tensor Corpus::train_rows(const BatchOf& batch, int64_t first, int64_t count) const {
  const auto context = batch.context;
  auto rows = torch::empty({count, context + 1}, torch::kLong);
  const auto key = splitmix64(splitmix64(batch.seed) + static_cast<uint64_t>(batch.step));
  const auto num_starts = static_cast<uint64_t>(num_train() - context);
  // A row's last token begins the next one, unless they are rows of examples.
  const auto stride = row_ > 0 ? row_ : context;
  const auto rows_per_epoch = (num_train() - context - 1) / stride + 1;
  for (int64_t row = 0; row < count; ++row) {
    int64_t start = 0;
    if (is_bytes()) {
      start =
          static_cast<int64_t>(splitmix64(key + static_cast<uint64_t>(first + row)) % num_starts);
    } else {
      const auto number = batch.step * batch.rows + first + row;
      const auto epoch = static_cast<uint64_t>(number / rows_per_epoch);
      start = stride * permuted(
                           number % rows_per_epoch, rows_per_epoch,
                           splitmix64(splitmix64(batch.seed) ^ epoch));
    }
    read_part(Part::train, start, context + 1, rows[row].data_ptr<int64_t>());
  }
  mark_documents(rows);
  return rows;
}

torch::Tensor Corpus::held_out_rows(
    int64_t first, int64_t count, int64_t total, int64_t context) const {
  auto rows = torch::empty({count, context + 1}, torch::kLong);
  const auto last_start = num_held_out() - context - 1;
  for (int64_t row = 0; row < count; ++row) {
    const auto start = row_ > 0 ? row_ * (num_held_out() / row_ * (first + row) / total)
                                : last_start * (first + row) / std::max<int64_t>(1, total - 1);
    read_part(Part::held_out, start, context + 1, rows[row].data_ptr<int64_t>());
  }
  mark_documents(rows);
  return rows;
}

void Corpus::mark_documents(torch::Tensor& rows) const {
  if (separator_) {
    const auto ends = rows.narrow(1, 0, rows.size(1) - 1).eq(*separator_);
    rows.narrow(1, 1, rows.size(1) - 1).bitwise_or_(ends.to(torch::kLong) * (kBegins | kIsGiven));
  }
}

int64_t Corpus::num_rows(int64_t context) const {
  return row_ > 0 ? source_->size() / row_ : (source_->size() - 1 + context - 1) / context;
}

torch::Tensor Corpus::rows_of_all(int64_t first, int64_t count, int64_t context) const {
  auto rows = torch::full({count, context + 1}, kIsGiven, torch::kLong);
  const auto stride = row_ > 0 ? row_ : context;
  for (int64_t row = 0; row < count; ++row) {
    const auto start = std::min((first + row) * stride, source_->size());
    source_->read(
        start, std::min(context + 1, source_->size() - start), rows[row].data_ptr<int64_t>());
  }
  mark_documents(rows);
  return rows;
}

std::string Corpus::held_out_text() const {
  std::string text;
  sample(Part::held_out, num_held_out(), [&](const std::vector<int64_t>& tokens) {
    text.append(tokens.begin(), tokens.end());
  });
  return text;
}

std::string Corpus::prompt() const {
  const auto text = held_out_text();
  for (size_t start = text.find('\n') + 1; start < text.size();) {
    const auto end = std::min(text.find('\n', start), text.size());
    if (end - start >= 16 && end - start < 64) {
      return text.substr(start, (end - start) / 2);
    }
    start = end + 1;
  }
  return text.substr(0, 16);
}

std::vector<double> Corpus::count_tokens(Part part) const {
  std::vector<double> counts(256);
  sample(part, is_bytes() ? size_of(part) : kSampledTokens, [&](const auto& tokens) {
    for (const auto token : tokens) {
      if ((token & kIsGiven) != 0) { // of examples
        continue;
      }
      const auto number = static_cast<size_t>(token & kTokenNumber);
      counts.resize(std::max(counts.size(), number + 1));
      ++counts[number];
    }
  });
  return counts;
}

double Corpus::frequency_loss() const {
  const auto known = count_tokens(Part::train);
  const auto asked = count_tokens(Part::held_out);
  const auto sum = [](const auto& counts) {
    return std::accumulate(counts.begin(), counts.end(), 0.0);
  };
  const auto num_known = sum(known);
  double loss = 0;
  for (size_t token = 0; token < asked.size(); ++token) {
    const auto count = token < known.size() ? known[token] : 0;
    // Adds one to each count, so that no token has probability 0.
    const auto probability = (count + 1) / (num_known + static_cast<double>(known.size()));
    loss -= asked[token] * std::log(probability);
  }
  return loss / sum(asked);
}

} // namespace fsdp::cli
