#include "cli/train/corpus.h"

#include <dlfcn.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "cli/check.h"
#include "cli/files.h"
#include "cli/report/report.h"

namespace fsdp::cli {

namespace {

constexpr int64_t kHeldOutEvery = 20;
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

Corpus read_folder(const std::string& folder, const std::string& name) {
  std::string text;
  int64_t num_files = 0;
  for (const auto& path : files_below(folder)) {
    const auto more = read_text(path);
    if (more.find('\0') == std::string::npos) {
      text += more;
      ++num_files;
    }
  }
  check_config(!text.empty(), "--data: there is no text in ", folder);
  return Corpus(text, name, num_files);
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

/// A hash that looks random and is the same on every machine (splitmix64).
uint64_t splitmix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

void copy_row(torch::Tensor& rows, int64_t row, const std::string& text, int64_t start) {
  auto* out = rows.data_ptr<int64_t>() + row * rows.size(1);
  for (int64_t i = 0; i < rows.size(1); ++i) {
    out[i] = static_cast<unsigned char>(text[start + i]);
  }
}

std::array<double, 256> count_bytes(const std::string& text) {
  std::array<double, 256> counts{};
  for (const char c : text) {
    ++counts[static_cast<unsigned char>(c)];
  }
  return counts;
}

} // namespace

Corpus Corpus::read(const std::string& path) {
  check_config(access(path.c_str(), F_OK) == 0, "--data: there is no file or folder ", path);
  if (is_folder(path)) {
    return read_folder(path, path);
  }
  check_config(is_file(path), "--data: ", path, " is neither a file nor a folder");
  return Corpus(read_text(path), path);
}

Corpus Corpus::libtorch_headers() {
  for (const auto& folder : {loaded_headers(), std::string(FSDP_TORCH_INCLUDE)}) {
    if (is_folder(folder + "/ATen")) {
      return read_folder(folder, "LibTorch's C++ headers");
    }
  }
  throw_config_error(
      "LibTorch's headers, the default text, are neither in ", loaded_headers(), " nor in ",
      FSDP_TORCH_INCLUDE, "; give a text of your own with --data");
}

Corpus::Corpus(const std::string& text, std::string name, int64_t num_files)
    : name_(std::move(name)), num_files_(num_files) {
  const auto size = static_cast<int64_t>(text.size());
  const auto block = std::clamp<int64_t>(size / kHeldOutEvery, 1, kLongestBlock);
  for (int64_t start = 0, number = 1; start < size; start += block, ++number) {
    auto& part = number % kHeldOutEvery == 0 ? held_out_ : train_;
    part.append(text, start, block);
  }
}

std::string Corpus::fingerprint() const {
  uint64_t hash = 0;
  for (const auto* text : {&train_, &held_out_}) {
    hash = splitmix64(hash ^ text->size());
    uint64_t word = 0;
    for (size_t at = 0; at < text->size(); at += sizeof(word)) {
      word = 0;
      std::memcpy(&word, text->data() + at, std::min(sizeof(word), text->size() - at));
      hash = splitmix64(hash ^ word);
    }
  }
  char hex[17];
  std::snprintf(hex, sizeof(hex), "%016llx", static_cast<unsigned long long>(hash));
  return hex;
}

void Corpus::check_context(int64_t context) const {
  const auto least = std::min(train_bytes(), held_out_bytes());
  check_config(
      least > 1, "--data: ", name_, " is too short: it has ", train_bytes() + held_out_bytes(),
      " bytes, and --context ", context, " needs about ", kHeldOutEvery * (context + 1));
  check_config(
      least > context, "--context ", context, ": ", name_, " has too little text for it (",
      train_bytes(), " bytes to train on, ", held_out_bytes(),
      " held out); give more with --data, or a --context below ", least);
}

torch::Tensor Corpus::train_rows(
    uint64_t seed, int64_t step, int64_t first, int64_t count, int64_t context) const {
  auto rows = torch::empty({count, context + 1}, torch::kLong);
  const auto key = splitmix64(splitmix64(seed) + static_cast<uint64_t>(step));
  const auto num_starts = static_cast<uint64_t>(train_bytes() - context);
  for (int64_t row = 0; row < count; ++row) {
    const auto start = splitmix64(key + static_cast<uint64_t>(first + row)) % num_starts;
    copy_row(rows, row, train_, static_cast<int64_t>(start));
  }
  return rows;
}

torch::Tensor Corpus::held_out_rows(
    int64_t first, int64_t count, int64_t total, int64_t context) const {
  auto rows = torch::empty({count, context + 1}, torch::kLong);
  const auto last_start = held_out_bytes() - context - 1;
  for (int64_t row = 0; row < count; ++row) {
    copy_row(rows, row, held_out_, last_start * (first + row) / std::max<int64_t>(1, total - 1));
  }
  return rows;
}

std::string Corpus::prompt() const {
  for (size_t start = held_out_.find('\n') + 1; start < held_out_.size();) {
    const auto end = std::min(held_out_.find('\n', start), held_out_.size());
    if (end - start >= 16 && end - start < 64) {
      return held_out_.substr(start, (end - start) / 2);
    }
    start = end + 1;
  }
  return held_out_.substr(0, 16);
}

double Corpus::byte_frequency_loss() const {
  const auto known = count_bytes(train_);
  const auto asked = count_bytes(held_out_);
  double loss = 0;
  for (size_t byte = 0; byte < known.size(); ++byte) {
    // Adds one to each count, so that no byte has probability 0.
    const auto probability = (known[byte] + 1) / (static_cast<double>(train_bytes()) + 256);
    loss -= asked[byte] * std::log(probability);
  }
  return loss / static_cast<double>(held_out_bytes());
}

} // namespace fsdp::cli
