#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace fsdp::detail {

// Reads and writes the JSON in files. A file may be damaged in any way, so every function throws a
// CheckpointError that names `file` if something is wrong.

/// Refuses duplicate keys, which the parser would merge, and deep nesting.
nlohmann::json parse_json(std::string_view text, const std::string& file);
/// The same for text with very many values of one kind: those at `depth`. 1 are the members of the
/// outermost object, 2 the members of these, and so on. Each of them is given to `take` and then
/// dropped, which takes less time and memory. `key` is that of the outermost object.
using TakeJson = std::function<void(const std::string& key, const nlohmann::json& value)>;
nlohmann::json parse_json(
    std::string_view text, const std::string& file, size_t depth, const TakeJson& take);
/// Refuses text that is not UTF-8.
std::string json_text(const nlohmann::json& value, const std::string& file);

const nlohmann::json& json_field(
    const nlohmann::json& object, const char* key, const std::string& file);
std::string json_string(const nlohmann::json& value, const char* what, const std::string& file);
/// A string that must be the name of a file in the same folder.
std::string json_file_name(const nlohmann::json& value, const char* what, const std::string& file);
/// A whole number that must not be negative and must fit int64_t.
int64_t json_size(const nlohmann::json& value, const char* what, const std::string& file);
std::vector<int64_t> json_sizes(
    const nlohmann::json& value, const char* what, const std::string& file);

} // namespace fsdp::detail
