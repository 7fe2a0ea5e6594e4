// Reads tokenizer.json.
#include <cerrno>
#include <cstring>
#include <set>

#include <nlohmann/json.hpp>

#include "cli/check.h"
#include "cli/files.h"
#include "cli/json_text.h"
#include "cli/text/tokenizer_parts.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::json;

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

/// Reads the fields of a tokenizer.json. The errors name the field.
class Reader {
 public:
  Reader(const Json& json, Tokenizer::Parts& parts) : json_(json), parts_(parts) {}

  void read() {
    check_config(json_.is_object(), "it does not hold an object");
    read_normalizer(json_.value("normalizer", Json()));
    read_pre_tokenizer(json_.value("pre_tokenizer", Json()));
    check_config(
        num_byte_levels_ == 1,
        "pre_tokenizer: it has no ByteLevel; only byte-level BPE is supported, as GPT-2, Llama 3 "
        "and Qwen have it");
    parts_.splitter.emplace(patterns_);
    if (patterns_.size() == 1) {
      const auto& pattern = patterns_[0];
      parts_.cuts_after_words = pattern == kGpt2;
      parts_.can_cut = pattern == kGpt2 || pattern == kLlama3 || pattern == kQwen;
    }
    read_model(json_.at("model"));
    for (const auto& added : json_.value("added_tokens", Json::array())) {
      read_added(added);
    }
    read_post_processor(json_.value("post_processor", Json()));
  }

 private:
  static std::string type_of(const Json& json) {
    return json.at("type").get<std::string>();
  }

  /// Throws unless the field is missing, null, false, 0 or empty.
  static void check_unset(const Json& json, const char* where, const char* field) {
    static const std::set<std::string> kUnset{"null", "false", "0", "0.0", "\"\"", "[]"};
    const auto value = json.value(field, Json()).dump();
    check_config(
        kUnset.contains(value), where, ": ", field, " is ", value, ", which is not supported");
  }

  void read_normalizer(const Json& json) {
    if (json.is_null()) {
      return;
    }
    const auto type = type_of(json);
    if (type == "Sequence") {
      for (const auto& inner : json.at("normalizers")) {
        read_normalizer(inner);
      }
      return;
    }
    check_config(type == "NFC", "normalizer: ", type, " is not supported, only NFC");
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
          " is not supported; only byte-level BPE is, as GPT-2, Llama 3 and Qwen have it");
      check_unset(json, "pre_tokenizer: ByteLevel", "add_prefix_space");
      if (json.value("use_regex", true)) {
        patterns_.emplace_back(kGpt2);
      }
      ++num_byte_levels_;
    }
  }

  void read_model(const Json& json) {
    const auto type = json.value("type", "BPE");
    check_config(type == "BPE", "model: ", type, " is not supported, only BPE");
    for (const auto* field :
         {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"}) {
      check_unset(json, "model", field);
    }
    for (const auto& [entry, token] : json.at("vocab").items()) {
      const auto bytes = bytes_of_entry(entry);
      parts_.set_bytes(checked_token(token, entry), bytes.value_or(entry));
      if (bytes) { // no text has the others, unless they are added tokens
        parts_.tokens[*bytes] = token;
      }
    }
    std::array<int64_t, 256> bytes{};
    for (size_t byte = 0; byte < bytes.size(); ++byte) {
      bytes[byte] = token_of(
          std::string{static_cast<char>(byte)}, "model: the vocabulary lacks byte ",
          std::to_string(byte));
    }
    parts_.bpe.emplace(bytes);
    for (const auto& merge : json.at("merges")) {
      add_merge(merge);
    }
    parts_.whole_words = json.value("ignore_merges", false);
  }

  void add_merge(const Json& json) {
    std::string left;
    std::string right;
    if (json.is_string()) { // older files: "left right"
      const auto text = json.get<std::string>();
      left = text.substr(0, text.find(' '));
      right = text.substr(std::min(text.size(), left.size() + 1));
    } else {
      left = json.at(0);
      right = json.at(1);
    }
    left = bytes_of_entry(left).value_or("");
    right = bytes_of_entry(right).value_or("");
    constexpr const char* kLacks = "model: the vocabulary lacks a token of the merge ";
    parts_.bpe->add_merge(
        token_of(left, kLacks, json.dump()), token_of(right, kLacks, json.dump()),
        token_of(left + right, kLacks, json.dump()));
  }

  void read_added(const Json& json) {
    const auto text = json.at("content").get<std::string>();
    const auto where = "added_tokens: " + text;
    check_config(!text.empty(), "added_tokens: one has no text");
    for (const auto* field : {"lstrip", "rstrip", "single_word"}) {
      check_unset(json, where.c_str(), field);
    }
    const auto token = checked_token(json.at("id"), text);
    parts_.set_bytes(token, text);
    parts_.added[text] = token;
    if (json.value("special", false)) {
      parts_.special.insert(token);
    }
    parts_.can_cut = parts_.can_cut && text.find('\n') == std::string::npos;
    if (json.value("normalized", true)) {
      parts_.normalized.add(parts_.composes ? composed(text) : text, token);
    } else {
      parts_.raw.add(text, token);
    }
  }

  void read_post_processor(const Json& json) {
    if (json.is_null()) {
      return;
    }
    const auto type = type_of(json);
    if (type == "Sequence") {
      for (const auto& inner : json.at("processors")) {
        read_post_processor(inner);
      }
      return;
    }
    if (type == "ByteLevel") { // changes offsets only
      return;
    }
    check_config(
        type == "TemplateProcessing", "post_processor: ", type,
        " is not supported, only TemplateProcessing");
    bool after = false;
    for (const auto& piece : json.at("single")) {
      if (piece.contains("Sequence")) {
        after = true;
        continue;
      }
      const auto name = piece.at("SpecialToken").at("id").get<std::string>();
      for (const auto& token : json.at("special_tokens").at(name).at("ids")) {
        (after ? parts_.suffix : parts_.prefix).push_back(token);
      }
    }
  }

  static int64_t checked_token(const Json& json, const std::string& text) {
    const auto token = json.get<int64_t>();
    check_config(
        token >= 0 && token < (1 << 28), "the token of '", text, "' is ", token,
        ", which is out of range");
    return token;
  }

  int64_t token_of(const std::string& bytes, const char* missing, const std::string& name) const {
    const auto found = parts_.tokens.find(bytes);
    check_config(found != parts_.tokens.end(), missing, name);
    return found->second;
  }

  const Json& json_;
  Tokenizer::Parts& parts_;
  std::vector<std::string> patterns_;
  int num_byte_levels_ = 0;
};

} // namespace

bool Tokenizer::is_in(const std::string& folder) {
  return is_file(folder + "/tokenizer.json");
}

Tokenizer Tokenizer::read(const std::string& folder) {
  const auto path = folder + "/tokenizer.json";
  const auto text = read_file(path);
  check_config(text.has_value(), path, " cannot be read: ", std::strerror(errno));
  auto parts = std::make_shared<Parts>();
  parts->folder = folder;
  try {
    Reader(Json::parse(*text), *parts).read();
  } catch (const Json::exception& error) {
    throw_config_error(path, " cannot be read: ", json_problem(error));
  } catch (const ConfigError& error) {
    throw_config_error(path, ": ", error.what_without_backtrace());
  }
  return Tokenizer(parts);
}

} // namespace fsdp::cli
