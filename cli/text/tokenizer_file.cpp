// Reads tokenizer.json.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "cli/check.h"
#include "cli/files.h"
#include "cli/json_text.h"
#include "cli/text/tokenizer_fields.h"

namespace fsdp::cli {

namespace {

/// Reads the fields of a tokenizer.json. The errors name the field.
class Reader {
 public:
  Reader(const Json& json, Tokenizer::Parts& parts) : json_(json), parts_(parts) {}

  void read() {
    check_config(json_.is_object(), "it does not hold an object");
    const auto& model = json_.at("model");
    const auto type = model.value("type", "BPE");
    check_config(type == "BPE", "model: ", type, " is not supported, only BPE");
    for (const auto* field : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
      check_unset(model, "model", field);
    }
    if (model.value("byte_fallback", false)) {
      read_sentencepiece(json_, parts_);
    } else {
      read_byte_level(json_, parts_);
    }
    for (const auto& added : json_.value("added_tokens", Json::array())) {
      read_added(added);
    }
    read_post_processor(json_.value("post_processor", Json()));
  }

 private:
  void read_added(const Json& json) {
    const auto text = json.at("content").get<std::string>();
    const auto where = "added_tokens: " + text;
    check_config(!text.empty(), "added_tokens: one has no text");
    for (const auto* field : {"lstrip", "rstrip", "single_word"}) {
      check_unset(json, where.c_str(), field);
    }
    const auto token = checked_token(json.at("id"), text);
    parts_.added[text] = token;
    if (json.value("special", false)) {
      parts_.special.insert(token);
    }
    const bool is_normalized = json.value("normalized", true);
    if (parts_.marks) {
      check_line_ends(text, is_normalized);
    } else {
      parts_.can_cut = parts_.can_cut && text.find('\n') == std::string::npos;
    }
    const auto searched = !is_normalized    ? text
                          : parts_.marks    ? parts_.marks->normalized(text, Before::kNothing)
                          : parts_.composes ? composed(text)
                                            : text;
    check_config(
        (is_normalized ? parts_.normalized : parts_.raw).add(searched, token), where,
        " is the text of another added token, too, after it is normalized");
    parts_.set_bytes(token, text);
    if (parts_.marks) {
      parts_.set_entry(token, searched); // the package decodes it in this form
    }
  }

  /// See Note [Where a text can be cut].
  void check_line_ends(const std::string& text, bool is_normalized) const {
    for (size_t at = text.find('\n'); at != text.npos; at = text.find('\n', at + 1)) {
      parts_.can_cut = parts_.can_cut && !is_normalized;
      if (at + 1 < text.size()) {
        parts_.no_cut_before[static_cast<unsigned char>(text[at + 1])] = true;
      }
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

  const Json& json_;
  Tokenizer::Parts& parts_;
};

} // namespace

std::string type_of(const Json& json) {
  return json.at("type").get<std::string>();
}

std::vector<Json> parts_of(const Json& json, const char* parts) {
  if (json.is_null() || type_of(json) != "Sequence") {
    return {json};
  }
  std::vector<Json> all;
  for (const auto& inner : json.at(parts)) {
    const auto more = parts_of(inner, parts);
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

void check_unset(const Json& json, const char* where, const char* field) {
  static const std::set<std::string> kUnset{"null", "false", "0", "0.0", "\"\"", "[]"};
  const auto value = json.value(field, Json()).dump();
  check_config(
      kUnset.contains(value), where, ": ", field, " is ", value, ", which is not supported");
}

int64_t checked_token(const Json& json, const std::string& text) {
  const auto token = json.get<int64_t>();
  check_config(
      token >= 0 && token < (1 << 28), "the token of '", text, "' is ", token,
      ", which is out of range");
  return token;
}

std::pair<std::string, std::string> halves_of(const Json& json) {
  if (!json.is_string()) {
    return {json.at(0).get<std::string>(), json.at(1).get<std::string>()};
  }
  const auto text = json.get<std::string>();
  const auto left = text.substr(0, text.find(' '));
  return {left, text.substr(std::min(text.size(), left.size() + 1))};
}

void add_merge(
    const Json& json, const std::string& left, const std::string& right, Tokenizer::Parts& parts) {
  const auto token_of = [&](const std::string& entry) {
    const auto found = parts.tokens.find(entry);
    if (found == parts.tokens.end()) { // the text of the error would take long for every merge
      throw_config_error("model: the vocabulary lacks a token of the merge ", json.dump());
    }
    return found->second;
  };
  parts.bpe->add_merge(token_of(left), token_of(right), token_of(left + right));
}

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
