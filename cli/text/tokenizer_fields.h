// What the readers of tokenizer.json share.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/text/tokenizer_parts.h"

namespace fsdp::cli {

using Json = nlohmann::json;

/// Read all but the added tokens and the template. `json` is a whole file.
void read_byte_level(const Json& json, Tokenizer::Parts& parts);
void read_sentencepiece(const Json& json, Tokenizer::Parts& parts);

/// The field "type".
std::string type_of(const Json& json);

/// The parts of a Sequence, whose field `parts` holds them, also of those inside of it. Anything
/// else is the only part of itself.
std::vector<Json> parts_of(const Json& json, const char* parts);

/// Throws unless the field is missing, null, false, 0 or empty.
void check_unset(const Json& json, const char* where, const char* field);

/// The number of a token. Throws if no vocabulary is so large.
int64_t checked_token(const Json& json, const std::string& text);

/// The two entries of a merge: ["left", "right"], or "left right" in older files.
std::pair<std::string, std::string> halves_of(const Json& json);

/// Adds a merge. Throws if the vocabulary lacks a half or both together.
void add_merge(
    const Json& json, const std::string& left, const std::string& right, Tokenizer::Parts& parts);

} // namespace fsdp::cli
