#include "checkpoint/json_text.h"

#include <limits>
#include <set>

#include "base/check.h"

namespace fsdp::detail {

using nlohmann::json;

json parse_json(std::string_view text, const std::string& file) {
  constexpr int kMaxDepth = 32;
  // The parser takes a zero byte for the end of the text, and would ignore what follows.
  FSDP_CHECK_AS(
      CheckpointError, text.find('\0') == std::string_view::npos, file,
      ": its JSON is broken: there is a zero byte in it");
  std::vector<std::set<std::string>> keys; // of each object that is being parsed
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    FSDP_CHECK_AS(CheckpointError, depth <= kMaxDepth, file, ": its JSON is nested too deep");
    if (event == json::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      FSDP_CHECK_AS(
          CheckpointError, keys.back().insert(key).second, file, ": the key '", key,
          "' is there twice");
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::exception& error) {
    FSDP_THROW(CheckpointError, file, ": its JSON is broken: ", error.what());
  }
}

std::string json_text(const json& value, const std::string& file) {
  try {
    return value.dump();
  } catch (const json::exception& error) {
    FSDP_THROW(
        CheckpointError, file, ": a name or a value cannot be written as JSON: ", error.what());
  }
}

const json& json_field(const json& object, const char* key, const std::string& file) {
  FSDP_CHECK_AS(
      CheckpointError, object.is_object() && object.contains(key), file, ": there is no '", key,
      "' where one has to be");
  return object.at(key);
}

std::string json_string(const json& value, const char* what, const std::string& file) {
  FSDP_CHECK_AS(CheckpointError, value.is_string(), file, ": '", what, "' is not a string");
  return value.get<std::string>();
}

std::string json_file_name(const json& value, const char* what, const std::string& file) {
  auto name = json_string(value, what, file);
  constexpr std::string_view kNone("/\0", 2);
  FSDP_CHECK_AS(
      CheckpointError,
      !name.empty() && name != "." && name != ".." && name.find_first_of(kNone) == name.npos, file,
      ": '", name, "' is not the name of a file in this folder");
  return name;
}

int64_t json_size(const json& value, const char* what, const std::string& file) {
  FSDP_CHECK_AS(
      CheckpointError,
      value.is_number_unsigned() &&
          value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()),
      file, ": '", what, "' is not a size");
  return value.get<int64_t>();
}

std::vector<int64_t> json_sizes(const json& value, const char* what, const std::string& file) {
  FSDP_CHECK_AS(CheckpointError, value.is_array(), file, ": '", what, "' is not a list");
  std::vector<int64_t> sizes;
  for (const auto& item : value) {
    sizes.push_back(json_size(item, what, file));
  }
  return sizes;
}

} // namespace fsdp::detail
