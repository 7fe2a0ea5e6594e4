#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace fsdp::detail {

// JSON from files that may be wrong in any way: every function throws
// CheckpointError that names `file`.

/// Refuses duplicate keys, which the parser would merge, and deep nesting.
nlohmann::json parse_json(std::string_view text, const std::string& file);
/// Refuses text that is not UTF-8.
std::string json_text(const nlohmann::json& value, const std::string& file);

const nlohmann::json& json_field(
    const nlohmann::json& object, const char* key, const std::string& file);
std::string json_string(const nlohmann::json& value, const char* what, const std::string& file);
/// A string that names a file in the same folder.
std::string json_file_name(const nlohmann::json& value, const char* what, const std::string& file);
/// A number that is no less than 0 and fits.
int64_t json_size(const nlohmann::json& value, const char* what, const std::string& file);
std::vector<int64_t> json_sizes(
    const nlohmann::json& value, const char* what, const std::string& file);

} // namespace fsdp::detail
