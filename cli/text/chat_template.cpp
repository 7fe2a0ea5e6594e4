#include "cli/text/chat_template.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "cli/files.h"
#include "cli/json_text.h"

namespace fsdp::cli {

namespace {

constexpr const char* kBlanks = " \t\n\r\v\f";

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (auto at = text.find(from); at != text.npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

/// Where the first tag of a template begins: at {{, {% or {#. Its end if there is none.
size_t find_tag(std::string_view text) {
  size_t at = 0;
  while (at < text.size() &&
         (text[at] != '{' || at + 1 == text.size() ||
          std::string_view("{%#").find(text[at + 1]) == std::string_view::npos)) {
    ++at;
  }
  return at;
}

/// Where the tag ends that a template begins with: behind its closing braces.
size_t end_of_tag(std::string_view text) {
  if (text.size() < 2) {
    return text.size();
  }
  const std::string close = text[1] == '{' ? "}}" : std::string{text[1]} + "}";
  char quote = 0; // of the string inside of which it is
  for (size_t at = 2; at < text.size(); ++at) {
    if (quote != 0) {
      at += static_cast<size_t>(text[at] == '\\');
      quote = at < text.size() && text[at] == quote ? 0 : quote;
    } else if (text.substr(at).starts_with(close)) {
      return at + 2;
    } else if (text[1] != '#' && (text[at] == '\'' || text[at] == '"')) {
      quote = text[at];
    }
  }
  return text.size();
}

std::string compact_code(const std::string& text) {
  auto code = text;
  std::replace(code.begin(), code.end(), '"', '\'');
  replace_all(code, "\\n", "\n");
  for (const std::string sign : {"+", "|", "{", "}"}) {
    while (code.find(" " + sign) != code.npos) {
      replace_all(code, " " + sign, sign);
    }
    while (code.find(sign + " ") != code.npos) {
      replace_all(code, sign + " ", sign);
    }
  }
  return code;
}

/// The text of a tag without its braces, percent signs and hyphens.
std::string inside_of(std::string_view tag) {
  const auto first = tag.find_first_not_of("{%- \n\t", 0);
  const auto last = tag.find_last_not_of("}%- \n\t");
  return first == tag.npos || last < first ? "" : std::string(tag.substr(first, last + 1 - first));
}

/// Whether a block that begins with this tag is only for conversations with tools or images. These
/// are the conditions of known templates. Others stay, because they may hold without tools.
bool is_for_tools(std::string_view tag) {
  return tag == "if tools is not none and (message == user_messages[-1])" ||
         tag == "elif message['content'] is iterable" ||
         tag.starts_with("elif message.tool_calls is defined") ||
         tag.starts_with("elif message['role'] == 'tool");
}

/// A block that is open.
struct Block {
  bool is_left_out = false;
  bool begins_in_list = false; // its `if` or `for` is not left out
};

} // namespace

ChatTemplate chat_template_of(const std::string& folder) {
  using Json = nlohmann::json;
  const auto file = folder + "/chat_template.jinja";
  if (const auto text = read_file(file)) {
    return {file, *text};
  }
  const auto config = folder + "/tokenizer_config.json";
  auto json = read_object(config).value("chat_template", Json());
  if (json.is_array()) { // several, with names
    Json chosen;
    for (const auto& each : json) {
      if (each.is_object() && (chosen.is_null() || each.value("name", Json()) == "default")) {
        chosen = each.value("template", Json());
      }
    }
    json = chosen;
  }
  return {config, json.is_string() ? json.get<std::string>() : ""};
}

std::vector<std::string> tags_of(const std::string& text) {
  const auto code = compact_code(text);
  std::vector<std::string> tags;
  std::vector<Block> open{{}}; // the first one is the template
  for (std::string_view rest = code; find_tag(rest) < rest.size();) {
    rest.remove_prefix(find_tag(rest));
    const auto size = end_of_tag(rest);
    const bool is_comment = rest.starts_with("{#");
    const bool is_block = rest.starts_with("{%");
    const auto tag = inside_of(rest.substr(0, size));
    rest.remove_prefix(size);
    const bool begins = is_block && (tag.starts_with("if ") || tag.starts_with("for "));
    const bool turns = is_block && (tag.starts_with("elif ") || tag == "else");
    const bool ends = is_block && (tag == "endif" || tag == "endfor");
    const auto closed = open.back();
    if ((turns || ends) && open.size() > 1) {
      open.pop_back();
    }
    if (begins || turns) {
      const bool is_left_out = open.back().is_left_out || is_for_tools(tag);
      open.push_back({is_left_out, begins ? !is_left_out : closed.begins_in_list});
    }
    const bool marks_learned = is_block && (tag == "generation" || tag == "endgeneration");
    if (!open.back().is_left_out && !is_comment && !marks_learned &&
        (!(turns || ends) || closed.begins_in_list)) {
      tags.push_back(tag);
    }
  }
  return tags;
}

bool writes_between_tags(std::string_view text) {
  if (text.ends_with('\n')) { // is removed
    text.remove_suffix(1);
  }
  bool at_begin = true;
  bool trims = false;        // the tag before ends with a hyphen
  bool behind_block = false; // it is {% %}: a line end behind it is removed
  while (!text.empty()) {
    const auto open = find_tag(text);
    const bool at_block = open + 1 < text.size() && text[open + 1] != '{';
    auto between = text.substr(0, open);
    if (between.find_first_not_of(kBlanks) != between.npos) {
      return true;
    }
    const bool is_trimmed = trims || text.substr(std::min(open + 2, text.size())).starts_with('-');
    const auto line = between.rfind('\n');
    if (at_block && (line != between.npos || at_begin)) { // blanks before it are removed
      between = between.substr(0, line + 1);
    }
    if (behind_block && between.starts_with('\n')) {
      between.remove_prefix(1);
    }
    if (!is_trimmed && !between.empty()) {
      return true;
    }
    text.remove_prefix(open);
    const auto size = end_of_tag(text);
    trims = size > 2 && text[size - 3] == '-';
    behind_block = at_block;
    at_begin = false;
    text.remove_prefix(size);
  }
  return false;
}

} // namespace fsdp::cli
