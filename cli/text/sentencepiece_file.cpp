// Reads what the BPE of SentencePiece has in tokenizer.json, as Llama 2, Mistral and Gemma have it.
#include <array>
#include <cstdio>
#include <optional>

#include "cli/check.h"
#include "cli/text/characters.h"
#include "cli/text/tokenizer_fields.h"

namespace fsdp::cli {

namespace {

/// The entry of the vocabulary for a byte.
std::string entry_of_byte(size_t byte) {
  std::array<char, 8> text{};
  std::snprintf(text.data(), text.size(), "<0x%02zX>", byte);
  return text.data();
}

/// Reads the fields. The errors name them.
class SentencePieceReader {
 public:
  explicit SentencePieceReader(Tokenizer::Parts& parts)
      : parts_(parts), marks_(parts.marks.emplace()) {}

  void read(const Json& json) {
    parts_.splitter.emplace(std::vector<std::string>()); // throws without the libraries for Unicode
    for (const auto& part : parts_of(json.value("normalizer", Json()), "normalizers")) {
      read_normalizer(part);
    }
    read_pre_tokenizer(json.value("pre_tokenizer", Json()));
    for (const auto& part : parts_of(json.value("decoder", Json()), "decoders")) {
      read_decoder(part);
    }
    read_model(json.at("model"));
  }

 private:
  void read_normalizer(const Json& json) {
    if (json.is_null()) {
      return;
    }
    const auto type = type_of(json);
    if (type == "Prepend") {
      const auto text = json.at("prepend").get<std::string>();
      check_config(
          text == kSpaceMark, "normalizer: Prepend of '", text, "' is not supported, only of '",
          kSpaceMark, "'");
      marks_.prefix += text;
    } else {
      check_config(
          type == "Replace", "normalizer: ", type,
          " is not supported with byte_fallback, only Prepend and Replace");
      check_replace(json, "normalizer", " ", kSpaceMark);
      marks_.replaces = true;
    }
  }

  static void check_replace(
      const Json& json, const char* where, std::string_view from, std::string_view to) {
    const auto& pattern = json.at("pattern");
    const auto& content = json.at("content");
    check_config(
        pattern == Json{{"String", from}} && content == Json(to), where, ": Replace of ",
        pattern.dump(), " by ", content.dump(), " is not supported, only of '", from, "' by '", to,
        "'");
  }

  void read_pre_tokenizer(const Json& json) {
    if (json.is_null()) {
      return;
    }
    const auto type = type_of(json);
    if (type == "Metaspace") {
      marks_.has_metaspace = true;
      marks_.metaspace = prepend_of(json, "pre_tokenizer");
      marks_.divides_at_marks = json.value("split", true);
      return;
    }
    check_config(
        type == "Split", "pre_tokenizer: ", type,
        " is not supported with byte_fallback, only Metaspace and Split");
    check_unset(json, "pre_tokenizer: Split", "invert");
    const auto& pattern = json.at("pattern");
    const auto behavior = json.at("behavior").get<std::string>();
    check_config(
        pattern == Json{{"String", " "}} && behavior == "MergedWithPrevious",
        "pre_tokenizer: Split by ", pattern.dump(), " with the behavior ", behavior,
        " is not supported with byte_fallback, only by ' ' with MergedWithPrevious");
    marks_.divides_after_spaces = true;
  }

  /// When Metaspace puts a mark before a text.
  static SpaceMarks::Prepend prepend_of(const Json& json, const std::string& where) {
    const auto mark = json.at("replacement").get<std::string>();
    check_config(
        mark == kSpaceMark, where, ": Metaspace with the replacement '", mark,
        "' is not supported, only with '", kSpaceMark, "'");
    // Older files have add_prefix_space instead.
    const bool adds = json.value("add_prefix_space", true);
    const auto scheme = json.value("prepend_scheme", adds ? "always" : "never");
    const bool is_known = scheme == "always" || scheme == "first" || scheme == "never";
    check_config(
        is_known && (adds || scheme == "never"), where, ": Metaspace with prepend_scheme ", scheme,
        adds ? "" : " and add_prefix_space false", " is not supported");
    return scheme == "always"  ? SpaceMarks::Prepend::kAlways
           : scheme == "first" ? SpaceMarks::Prepend::kFirst
                               : SpaceMarks::Prepend::kNever;
  }

  void read_decoder(const Json& json) {
    const auto type = json.is_null() ? "null" : type_of(json);
    using Kind = DecodeStep::Kind;
    if (type == "Fuse") {
      is_fused_ = true;
    } else if (type == "Strip") {
      check_unset(json, "decoder: Strip", "stop");
      const auto content = json.at("content").get<std::string>();
      check_config(!content.empty(), "decoder: Strip has no content");
      parts_.decoder.push_back(
          {.kind = Kind::kStrip,
           .fused = is_fused_,
           .content = content,
           .count = json.at("start")});
    } else if (type == "Replace") {
      check_replace(json, "decoder", kSpaceMark, " ");
      parts_.decoder.push_back({.kind = Kind::kSpaces, .content = "", .count = 0});
    } else {
      check_config(
          type == "ByteFallback" || type == "Metaspace", "decoder: ", type,
          " is not supported with byte_fallback, only Replace, ByteFallback, Fuse, Strip and "
          "Metaspace");
      check_config(!is_fused_, "decoder: ", type, " after Fuse is not supported");
      const bool is_bytes = type == "ByteFallback";
      const bool vanishes = !is_bytes && prepend_of(json, "decoder") != SpaceMarks::Prepend::kNever;
      parts_.decoder.push_back(
          {.kind = is_bytes ? Kind::kBytes : Kind::kMetaspace,
           .content = "",
           .count = vanishes ? 1U : 0U});
    }
  }

  void read_model(const Json& json) {
    const auto& vocab = json.at("vocab");
    for (const auto& [entry, number] : vocab.items()) {
      const auto token = checked_token(number, entry);
      parts_.tokens[entry] = token;
      parts_.set_entry(token, entry);
      parts_.set_bytes(token, bytes_of(entry));
    }
    std::array<int64_t, 256> bytes{};
    for (size_t byte = 0; byte < bytes.size(); ++byte) {
      const auto entry = entry_of_byte(byte);
      const auto found = parts_.tokens.find(entry);
      check_config(
          found != parts_.tokens.end(), "model: byte_fallback is true, but the vocabulary lacks ",
          entry);
      bytes[byte] = found->second;
    }
    const auto unknown = json.value("unk_token", Json());
    check_config(
        unknown.is_null() || parts_.tokens.contains(unknown.get<std::string>()),
        "model: the vocabulary lacks the unk_token ", unknown.dump());
    parts_.bpe.emplace(bytes);
    for (const auto& [entry, token] : parts_.tokens) {
      if (!entry.empty() && character_length(entry[0]) == entry.size()) {
        parts_.bpe->add_character(entry, token);
      }
    }
    parts_.whole_words = json.value("ignore_merges", false);
    parts_.can_cut = !parts_.whole_words;
    marks_.marks_only_begin_tokens = !parts_.whole_words && parts_.tokens.contains(kSpaceMark);
    for (const auto& merge : json.at("merges")) {
      read_merge(merge);
    }
    // Where a mark may not follow, a space may not, because it becomes one.
    parts_.no_cut_before[' '] = parts_.no_cut_before[' '] || parts_.no_cut_before[0xe2];
  }

  void read_merge(const Json& json) {
    const auto [left, right] = halves_of(json);
    add_merge(json, left, right, parts_);
    if (right.starts_with(kSpaceMark) && !left.ends_with(kSpaceMark)) {
      marks_.marks_only_begin_tokens = false;
    }
    if (left.ends_with('\n') || left.ends_with(entry_of_byte('\n'))) {
      parts_.no_cut_before[static_cast<unsigned char>(right[0])] = true;
      // Any character may begin with the token of a byte.
      parts_.can_cut = parts_.can_cut && !right.starts_with("<0x");
    }
  }

  /// What a token stands for inside of a text.
  std::string bytes_of(const std::string& entry) const {
    if (const auto byte = byte_of_entry(entry)) {
      return {*byte}; // also if the decoder leaves its name as it is
    }
    std::string result = entry;
    for (const auto& step : parts_.decoder) {
      if (step.kind != DecodeStep::Kind::kBytes && step.kind != DecodeStep::Kind::kStrip) {
        result = without_marks(result, " ");
      }
    }
    return result;
  }

  Tokenizer::Parts& parts_;
  SpaceMarks& marks_;
  bool is_fused_ = false; // a Fuse was among the decoders
};

} // namespace

void read_sentencepiece(const Json& json, Tokenizer::Parts& parts) {
  SentencePieceReader(parts).read(json);
}

} // namespace fsdp::cli
