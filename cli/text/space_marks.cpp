#include "cli/text/space_marks.h"

namespace fsdp::cli {

namespace {

void append_marked(std::string_view text, std::string& result) {
  result.reserve(result.size() + text.size() + text.size() / 2);
  for (const char c : text) {
    if (c == ' ') {
      result += kSpaceMark;
    } else {
      result += c;
    }
  }
}

} // namespace

std::string without_marks(std::string_view text, std::string_view space) {
  std::string result;
  for (auto at = text.find(kSpaceMark); at != text.npos; at = text.find(kSpaceMark)) {
    result += text.substr(0, at);
    result += space;
    text.remove_prefix(at + kSpaceMark.size());
  }
  result += text;
  return result;
}

std::string SpaceMarks::normalized(std::string_view text, Before before) const {
  std::string result;
  if (!text.empty() && (before == Before::kNothing || before == Before::kRawToken)) {
    result = prefix;
  }
  if (replaces) {
    append_marked(text, result);
  } else {
    result += text;
  }
  return result;
}

std::string SpaceMarks::marked(std::string_view text, Before before) const {
  const bool prepends = (metaspace == Prepend::kAlways && before != Before::kText) ||
                        (metaspace == Prepend::kFirst && before == Before::kNothing);
  std::string result;
  if (prepends && !text.starts_with(' ') && !text.starts_with(kSpaceMark)) {
    result = kSpaceMark;
  }
  append_marked(text, result);
  return result;
}

bool SpaceMarks::is_border(std::string_view text, size_t at) const {
  if (divides_after_spaces && text[at - 1] == ' ') {
    return true;
  }
  // Most bytes are not the first one of a mark.
  if (text[at] != kSpaceMark[0] || !text.substr(at).starts_with(kSpaceMark)) {
    return false;
  }
  return divides_at_marks || (marks_only_begin_tokens && !text.substr(0, at).ends_with(kSpaceMark));
}

} // namespace fsdp::cli
