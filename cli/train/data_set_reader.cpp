#include "cli/train/data_set_reader.h"

#include <dlfcn.h>
#include <glob.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "cli/check.h"
#include "cli/files.h"
#include "cli/report/report.h"
#include "cli/text/examples.h"
#include "cli/train/packing.h"

namespace fsdp::cli {

namespace {

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

/// Throws ConfigError if the model does not have the token. `unit` and `number` say where it is.
int64_t checked_token(
    int64_t token,
    const std::string& name,
    const char* unit,
    int64_t number,
    const TokensOf& tokens) {
  check_config(
      token < tokens.vocab, "--data: ", name, " has the token ", token, " ('",
      tokens.tokenizer->bytes_of(token), "') ", unit, " ", number, ", but the model has only ",
      tokens.vocab);
  return token;
}

/// The tokens of text files, each of which is a document or holds documents.
DataSet tokenize_files(
    const std::vector<std::string>& files, const std::string& name, const TokensOf& tokens) {
  check_config(
      tokens.documents.end || !tokens.needs_end, "--data: ", name,
      " has documents, and tokenizer_config.json of --from names no eos_token of the tokenizer, "
      "which belongs after each; make a file of tokens by fsdp tokenize --end");
  std::vector<int32_t> all;
  tokenize_documents(
      *tokens.tokenizer, files, tokens.documents, [&](const std::vector<int64_t>& more) {
        for (const auto token : more) {
          const auto index = std::ssize(all);
          all.push_back(
              static_cast<int32_t>(checked_token(token, name, "at index", index, tokens)));
        }
      });
  return {std::make_shared<TokenList>(std::move(all)), name, std::ssize(files)};
}

/// All text below a folder: the files that are not empty and have no zero byte.
DataSet read_folder(const std::string& folder, const std::string& name, const TokensOf& tokens) {
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
                          : DataSet(std::move(text), name, std::ssize(files));
}

DataSet read_packed(const std::string& path, const TokensOf& tokens) {
  check_config(
      tokens.tokenizer.has_value(), "--data: ", path,
      " holds examples, for which a tokenizer is needed; give a model with --from whose folder has "
      "a tokenizer.json");
  const auto examples = read_examples(*tokens.tokenizer, path, tokens.documents.end);
  for (const auto& example : examples) {
    for (const auto token : example.tokens) {
      checked_token(token, path, "in line", example.line, tokens);
    }
  }
  return {
      std::make_shared<TokenList>(pack_examples(examples, path, tokens.context)), path,
      /*num_files=*/1, /*row=*/tokens.context + 1};
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
        ", which is not a file of tokens (.bin or .npy)");
  }
  return files;
}

/// There may also be a file with such a name.
bool is_pattern(const std::string& path) {
  return path.find_first_of("*?[") != std::string::npos && access(path.c_str(), F_OK) != 0;
}

constexpr int64_t kCheckedTokens = 1 << 26; // before the first step

} // namespace

bool is_text_path(const std::string& path) {
  return !is_token_file(path) && !is_pattern(path);
}

DataSet read_data_set(const std::string& path, const TokensOf& tokens) {
  const auto open_tokens = [&](const std::vector<std::string>& files) {
    DataSet data(open_token_files(files, tokens.raw, tokens.vocab), path, std::ssize(files));
    for (const auto part : {DataSet::Part::train, DataSet::Part::held_out}) {
      data.sample(part, kCheckedTokens, [](const auto&) {}); // reading checks them
    }
    return data;
  };
  if (is_pattern(path)) {
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
                                : DataSet(read_text(path), path, /*num_files=*/1);
}

DataSet read_libtorch_headers(const TokensOf& tokens) {
  for (const auto& folder : {loaded_headers(), std::string(FSDP_TORCH_INCLUDE)}) {
    if (is_folder(folder + "/ATen")) {
      return read_folder(folder, "LibTorch's C++ headers", tokens);
    }
  }
  throw_config_error(
      "LibTorch's headers, the default text, are neither in ", loaded_headers(), " nor in ",
      FSDP_TORCH_INCLUDE, "; give a text of your own with --data");
}

} // namespace fsdp::cli
