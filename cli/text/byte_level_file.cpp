// Reads what byte-level BPE has in tokenizer.json.
#include <array>
#include <optional>
#include <unordered_map>

#include "cli/check.h"
#include "cli/text/tokenizer_fields.h"

namespace fsdp::cli {

namespace {

constexpr const char* kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

std::string utf8(uint32_t point) { // below 0x800
  return point < 0x80
             ? std::string{static_cast<char>(point)}
             : std::string{
                   static_cast<char>(0xc0 | point >> 6), static_cast<char>(0x80 | (point & 0x3f))};
}

/// The character that stands for each byte in the file. Bytes that can be printed in Latin-1 stand
/// for themselves, and the others for characters from U+0100 on.
const std::unordered_map<std::string, char>& bytes_of_characters() {
  static const auto bytes = [] {
    std::unordered_map<std::string, char> result;
    uint32_t next = 0x100;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const bool printed = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte != 0xad);
      result[utf8(printed ? byte : next++)] = static_cast<char>(byte);
    }
    return result;
  }();
  return bytes;
}

/// The bytes for which an entry of the vocabulary stands. Nothing if it has a character that stands
/// for no byte.
std::optional<std::string> bytes_of_entry(const std::string& entry) {
  const auto& bytes = bytes_of_characters();
  std::string result;
  for (size_t at = 0; at < entry.size();) {
    const size_t length = (entry[at] & 0x80) == 0 ? 1 : 2;
    const auto found = bytes.find(entry.substr(at, length));
    if (found == bytes.end()) {
      return std::nullopt;
    }
    result += found->second;
    at += length;
  }
  return result;
}

/// Reads the fields. The errors name them.
class ByteLevelReader {
 public:
  explicit ByteLevelReader(Tokenizer::Parts& parts) : parts_(parts) {}

  void read(const Json& json) {
    for (const auto& part : parts_of(json.value("normalizer", Json()), "normalizers")) {
      read_normalizer(part);
    }
    read_pre_tokenizer(json.value("pre_tokenizer", Json()));
    check_config(
        num_byte_levels_ == 1,
        "pre_tokenizer: it has no ByteLevel, and model: byte_fallback is not true; only byte-level "
        "BPE, as GPT-2, Llama 3 and Qwen have it, and BPE with byte_fallback, as Llama 2, Mistral "
        "and Gemma have it, are supported");
    parts_.splitter.emplace(patterns_);
    if (patterns_.size() == 1) {
      const auto& pattern = patterns_[0];
      parts_.cuts_after_words = pattern == kGpt2;
      parts_.can_cut = pattern == kGpt2 || pattern == kLlama3 || pattern == kQwen;
    }
    read_model(json.at("model"));
  }

 private:
  void read_normalizer(const Json& json) {
    if (json.is_null()) {
      return;
    }
    const auto type = type_of(json);
    check_config(
        type == "NFC", "normalizer: ", type, " is not supported without byte_fallback, only NFC");
    parts_.composes = true;
  }

  void read_pre_tokenizer(const Json& json) {
    const auto type = json.is_null() ? "null" : type_of(json);
    check_config(
        num_byte_levels_ == 0, "pre_tokenizer: ", type, " after ByteLevel is not supported");
    if (type == "Sequence") {
      for (const auto& inner : json.at("pretokenizers")) {
        read_pre_tokenizer(inner);
      }
    } else if (type == "Split") {
      const auto behavior = json.at("behavior").get<std::string>();
      check_config(
          behavior == "Isolated", "pre_tokenizer: the behavior ", behavior,
          " of Split is not supported, only Isolated");
      check_unset(json, "pre_tokenizer: Split", "invert");
      const auto& pattern = json.at("pattern");
      check_config(
          pattern.contains("Regex"), "pre_tokenizer: Split by ", pattern.dump(),
          " is not supported, only by Regex");
      patterns_.push_back(pattern.at("Regex"));
    } else {
      check_config(
          type == "ByteLevel", "pre_tokenizer: ", type,
          " is supported only if model has byte_fallback, as Llama 2, Mistral and Gemma have it");
      check_unset(json, "pre_tokenizer: ByteLevel", "add_prefix_space");
      if (json.value("use_regex", true)) {
        patterns_.emplace_back(kGpt2);
      }
      ++num_byte_levels_;
    }
  }

  void read_model(const Json& json) {
    for (const auto& [entry, token] : json.at("vocab").items()) {
      const auto bytes = bytes_of_entry(entry);
      parts_.set_bytes(checked_token(token, entry), bytes.value_or(entry));
      if (bytes) { // no text has the others, unless they are added tokens
        parts_.tokens[*bytes] = token;
      }
    }
    std::array<int64_t, 256> bytes{};
    for (size_t byte = 0; byte < bytes.size(); ++byte) {
      const auto found = parts_.tokens.find(std::string{static_cast<char>(byte)});
      check_config(found != parts_.tokens.end(), "model: the vocabulary lacks byte ", byte);
      bytes[byte] = found->second;
    }
    parts_.bpe.emplace(bytes);
    for (const auto& merge : json.at("merges")) {
      const auto [left, right] = halves_of(merge);
      add_merge(
          merge, bytes_of_entry(left).value_or(""), bytes_of_entry(right).value_or(""), parts_);
    }
    parts_.whole_words = json.value("ignore_merges", false);
  }

  Tokenizer::Parts& parts_;
  std::vector<std::string> patterns_;
  int num_byte_levels_ = 0;
};

} // namespace

void read_byte_level(const Json& json, Tokenizer::Parts& parts) {
  ByteLevelReader(parts).read(json);
}

} // namespace fsdp::cli
