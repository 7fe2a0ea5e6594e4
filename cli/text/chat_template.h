#pragma once

#include <string>
#include <string_view>

namespace fsdp::cli {

/// The Jinja template of a folder, which says how conversations are written. It is not run, only
/// searched for parts that are known.
struct ChatTemplate {
  std::string file;
  std::string text; // empty: there is none
};

ChatTemplate chat_template_of(const std::string& folder);

/// The text of a template in one way of writing: strings have single quotes, "\n" in them is a line
/// end, there are no spaces beside + | { and }, and no hyphens beside {{ and }}.
std::string compact_code(const std::string& text);

/// Whether a template writes something that stands outside of its tags, as transformers runs it.
bool writes_between_tags(std::string_view text);

} // namespace fsdp::cli
