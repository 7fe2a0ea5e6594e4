#include "cli/train/token_source.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "cli/check.h"
#include "cli/files.h"
#include "cli/mapped_file.h"

namespace fsdp::cli {

namespace {

int64_t bytes_of(TokenType type) {
  return type == TokenType::uint8    ? 1
         : type == TokenType::uint16 ? 2
         : type == TokenType::int64  ? 8
                                     : 4;
}

/// Where a file has its tokens.
struct TokenLayout {
  TokenType type = TokenType::uint16;
  int64_t offset = 0; // in bytes
  int64_t count = 0;
};

/// Throws ConfigError unless the file has all of its tokens and nothing after them.
TokenLayout checked(const MappedFile& file, const TokenLayout& layout, const char* says) {
  const auto room = file.size() - layout.offset;
  check_config(
      layout.count >= 0 && room % bytes_of(layout.type) == 0 &&
          layout.count == room / bytes_of(layout.type),
      "--data: ", file.path(), " is damaged: ", says, " ", layout.count, " tokens, and there are ",
      room / bytes_of(layout.type));
  return layout;
}

constexpr int32_t kLlmcGpt2 = 20240520;   // uint16
constexpr int32_t kLlmcLlama3 = 20240801; // uint32
constexpr int64_t kLlmcHeader = 1024;     // bytes

/// llm.c: 256 numbers of 4 bytes, of which the first is a mark and the third the number of tokens.
TokenLayout llmc_layout(const MappedFile& file) {
  const auto version = file.at<int32_t>(4);
  check_config(
      version == (file.at<int32_t>(0) == kLlmcGpt2 ? 1 : 7), "--data: ", file.path(),
      " has a header of llm.c of version ", version, ", which is not known here");
  return checked(
      file,
      {.type = file.at<int32_t>(0) == kLlmcGpt2 ? TokenType::uint16 : TokenType::uint32,
       .offset = kLlmcHeader,
       .count = file.at<int32_t>(8)},
      "its header has");
}

/// NumPy: a header in the syntax of Python.
TokenLayout npy_layout(const MappedFile& file) {
  const auto refuse = [&](const std::string& why) {
    throw_config_error("--data: ", file.path(), ": ", why);
  };
  const bool is_npy = file.text().starts_with("\x93NUMPY") && file.size() > 12;
  const bool wide = is_npy && file.at<uint8_t>(6) >= 2; // the version
  const auto start = wide ? 12 : 10;
  const int64_t length = !is_npy ? 0 : wide ? file.at<uint32_t>(8) : file.at<uint16_t>(8);
  if (length == 0 || start + length > file.size()) {
    refuse("it is not a file of NumPy");
  }
  const std::string header(file.data() + start, static_cast<size_t>(length));
  const auto value_of = [&](const std::string& key) {
    const auto at = header.find("'" + key + "':");
    return at == std::string::npos ? std::string() : header.substr(at + key.size() + 3);
  };
  const auto dtype = value_of("descr");
  TokenLayout layout{.offset = start + length};
  if (dtype.starts_with(" '<u2'")) {
    layout.type = TokenType::uint16;
  } else if (dtype.starts_with(" '<u4'")) {
    layout.type = TokenType::uint32;
  } else if (dtype.starts_with(" '<i4'")) {
    layout.type = TokenType::int32;
  } else if (dtype.starts_with(" '<i8'") || dtype.starts_with(" '<u8'")) {
    layout.type = TokenType::int64;
  } else if (dtype.starts_with(" '|u1'")) {
    layout.type = TokenType::uint8;
  } else {
    refuse("its dtype is not one of uint8, uint16, uint32, int32 and int64 (little endian)");
  }
  long long count = 0;
  char end = 0;
  if (std::sscanf(value_of("shape").c_str(), " (%lld , %c", &count, &end) != 2 || end != ')') {
    refuse("it must have one axis");
  }
  layout.count = count;
  return checked(file, layout, "its header has");
}

/// Megatron: the .idx beside the .bin has the type of the tokens and the lengths of the sequences.
TokenLayout megatron_layout(const MappedFile& file, const std::string& index_path) {
  const MappedFile index(index_path, "--data: ");
  constexpr std::string_view kMark("MMIDIDX\0\0", 9);
  constexpr int64_t kHeader = 9 + 8 + 1 + 8 + 8;
  check_config(
      index.text().starts_with(kMark) && index.size() >= kHeader, "--data: ", index_path,
      " is not an index of Megatron; rename it if ", file.path(), " has nothing to do with it");
  const auto code = index.at<uint8_t>(17);
  const auto sequences = index.at<int64_t>(18);
  const auto documents = index.at<int64_t>(26);
  TokenLayout layout;
  layout.type = code == 1   ? TokenType::uint8
                : code == 8 ? TokenType::uint16
                : code == 4 ? TokenType::int32
                            : TokenType::int64;
  check_config(
      code == 1 || code == 4 || code == 5 || code == 8, "--data: ", index_path,
      " says that tokens have type ", int{code},
      " of Megatron; uint8 (1), int32 (4), int64 (5) and uint16 (8) can be read");
  // A length and an offset for each sequence, and a number for each document.
  const auto rest = index.size() - kHeader;
  check_config(
      index.at<int64_t>(9) == 1 && sequences >= 0 && sequences <= rest / 12 && documents >= 0 &&
          documents <= rest / 8 && 12 * sequences + 8 * documents == rest,
      "--data: ", index_path, " is damaged: it has ", index.size(), " bytes, and should have ",
      sequences, " sequences and ", documents, " documents in version 1");
  for (int64_t i = 0; i < sequences; ++i) {
    const auto length = index.at<int32_t>(kHeader + 4 * i);
    check_config(length >= 0, "--data: ", index_path, ": sequence ", i, " has the length ", length);
    const auto offset = index.at<int64_t>(kHeader + 4 * sequences + 8 * i);
    check_config(
        offset == layout.count * bytes_of(layout.type), "--data: ", index_path, ": sequence ", i,
        " is at byte ", offset,
        ", not where the one before it ends; write the files again in order");
    layout.count += length;
  }
  return checked(file, layout, "its index has");
}

/// Whether each second number of 16 bits is 0, as in tokens of 32 bits that are below 2^16.
bool looks_like_uint32(const MappedFile& file) {
  constexpr int64_t kLeast = 256; // bytes; of fewer, it may be chance
  constexpr int64_t kMost = 4096 * 2;
  const auto size = std::min(file.size(), kMost);
  bool has_tokens = false; // only zeros say nothing
  for (int64_t at = 2; at < size; at += 4) {
    if (file.at<uint16_t>(at) != 0) {
      return false;
    }
    has_tokens |= file.at<uint16_t>(at - 2) != 0;
  }
  return has_tokens && size >= kLeast && file.size() % 4 == 0;
}

/// The layout of a .bin file that has nothing but tokens.
TokenLayout raw_layout(const MappedFile& file, std::optional<TokenType> raw, int64_t vocab) {
  const auto type =
      raw.value_or(vocab > (int64_t{1} << 16) ? TokenType::uint32 : TokenType::uint16);
  check_config(
      file.size() % bytes_of(type) == 0, "--data: ", file.path(), " has ", file.size(),
      " bytes, which is not a whole number of tokens of ", bytes_of(type), " bytes");
  check_config(
      raw || type == TokenType::uint32 || !looks_like_uint32(file), "--data: ", file.path(),
      " looks like uint32, because each second number of 16 bits is 0; give --token-dtype uint32 "
      "or uint16");
  return {.type = type, .count = file.size() / bytes_of(type)};
}

TokenLayout layout_of(const MappedFile& file, std::optional<TokenType> raw, int64_t vocab) {
  if (file.path().ends_with(".npy")) {
    return npy_layout(file);
  }
  const auto index = file.path().substr(0, file.path().size() - 4) + ".idx";
  if (is_file(index)) {
    return megatron_layout(file, index);
  }
  const auto mark = file.size() >= kLlmcHeader ? file.at<int32_t>(0) : 0;
  return mark == kLlmcGpt2 || mark == kLlmcLlama3 ? llmc_layout(file)
                                                  : raw_layout(file, raw, vocab);
}

class TokenFiles : public TokenSource {
 public:
  TokenFiles(const std::vector<std::string>& paths, std::optional<TokenType> raw, int64_t vocab)
      : vocab_(vocab) {
    for (const auto& path : paths) {
      auto file = std::make_shared<MappedFile>(path, "--data: ");
      const auto layout = layout_of(*file, raw, vocab);
      parts_.push_back({std::move(file), layout, size_});
      size_ += layout.count;
    }
  }
  int64_t size() const override {
    return size_;
  }
  void read(int64_t start, int64_t count, int64_t* out) const override {
    auto part = std::upper_bound(
        parts_.begin(), parts_.end(), start,
        [](int64_t at, const Part& each) { return at < each.start; });
    for (--part; count > 0; ++part) {
      const auto from = start - part->start;
      const auto here = std::min(count, part->layout.count - from);
      copy(*part, from, here, out);
      start += here;
      count -= here;
      out += here;
    }
  }

 private:
  struct Part {
    std::shared_ptr<MappedFile> file;
    TokenLayout layout;
    int64_t start; // of its first token among all
  };

  void copy(const Part& part, int64_t from, int64_t count, int64_t* out) const {
    const auto& [file, layout, start] = part;
    const auto* const bytes = file->data() + layout.offset + from * bytes_of(layout.type);
    const auto copy_as = [&]<class T>(T) {
      for (int64_t i = 0; i < count; ++i) {
        T token;
        std::memcpy(&token, bytes + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
        out[i] = static_cast<int64_t>(token);
      }
    };
    switch (layout.type) {
      case TokenType::uint8:
        copy_as(uint8_t{});
        break;
      case TokenType::uint16:
        copy_as(uint16_t{});
        break;
      case TokenType::uint32:
        copy_as(uint32_t{});
        break;
      case TokenType::int32:
        copy_as(int32_t{});
        break;
      case TokenType::int64:
        copy_as(int64_t{});
        break;
    }
    for (int64_t i = 0; i < count; ++i) {
      check_config(
          out[i] >= 0 && out[i] < vocab_, "--data: ", file->path(), " has token ", out[i],
          " at position ", from + i, ", and the model has ", vocab_,
          " tokens (--vocab); was it written for another model, or with another --token-dtype?");
    }
  }

  const int64_t vocab_;
  std::vector<Part> parts_;
  int64_t size_ = 0;
};

} // namespace

void TextSource::read(int64_t start, int64_t count, int64_t* out) const {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<unsigned char>(text_[static_cast<size_t>(start + i)]);
  }
}

std::optional<TokenType> raw_type(const std::string& name) {
  return name == "auto"     ? std::nullopt
         : name == "uint32" ? std::optional(TokenType::uint32)
                            : std::optional(TokenType::uint16);
}

bool is_token_file(const std::string& path) {
  return path.ends_with(".bin") || path.ends_with(".npy");
}

std::shared_ptr<TokenSource> open_token_files(
    const std::vector<std::string>& paths, std::optional<TokenType> raw, int64_t vocab) {
  return std::make_shared<TokenFiles>(paths, raw, vocab);
}

} // namespace fsdp::cli
