#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fsdp::cli {

/// The Jinja template of a folder, which says how conversations are written. It is not run, only
/// searched for parts that are known.
struct ChatTemplate {
  std::string file;
  std::string text; // empty: there is none
};

ChatTemplate chat_template_of(const std::string& folder);

/// What stands inside of the tags of a template, one after another. Leaves out comments, marks of
/// what is learned, and what runs only for conversations with tools or images. All is in one way of
/// writing: strings have single quotes, "\n" in them is a line end, and there are no spaces beside
/// + | { and }.
std::vector<std::string> tags_of(const std::string& text);

/// Whether a template writes something that stands outside of its tags, as transformers runs it.
bool writes_between_tags(std::string_view text);

} // namespace fsdp::cli
