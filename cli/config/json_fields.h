#pragma once

#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

#include "cli/check.h"
#include "cli/files.h"
#include "cli/json_text.h"

namespace fsdp::cli {

/// The fields of a JSON file. Remembers which ones were read.
class JsonFields {
 public:
  using Json = nlohmann::ordered_json;

  /// What a file holds. Throws ConfigError if it cannot be read, or is not JSON.
  static Json parse(const std::string& file) {
    const auto text = read_file(file);
    check_config(text.has_value(), file, " cannot be read: ", std::strerror(errno));
    try {
      return Json::parse(*text);
    } catch (const Json::exception& error) {
      throw_config_error(file, ": it is not JSON: ", json_problem(error));
    }
  }
  /// Throws ConfigError if the file cannot be read, or does not hold an object.
  static JsonFields read(const std::string& file) {
    return {parse(file), file};
  }
  JsonFields(Json json, std::string file) : json_(std::move(json)), file_(std::move(file)) {
    check_config(json_.is_object(), file_, ": it does not hold an object");
  }

  /// The value of a field; `otherwise` if the field is missing or null.
  template <class T>
  T get(const std::string& key, T otherwise) {
    read_.insert(key);
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) {
      return otherwise;
    }
    try {
      if (!std::is_same_v<T, int64_t> || found->is_number_integer()) { // 2.9 would become 2
        return found->template get<T>();
      }
    } catch (const Json::exception&) { // below
    }
    throw_config_error(file_, ": \"", key, "\" is ", found->dump(), ", which has the wrong type");
  }
  /// The value of a field; 0 if it is null, and `if_missing` if it is missing.
  template <class T>
  T get_or_zero(const std::string& key, T if_missing) {
    return get<T>(key, json_.contains(key) ? 0 : if_missing);
  }
  template <class T>
  T require(const std::string& key) {
    const auto found = json_.find(key);
    check_config(found != json_.end() && !found->is_null(), file_, ": \"", key, "\" is missing");
    return get<T>(key, {});
  }
  /// Throws unless a field that may be left out has the only value that is supported.
  template <class T>
  void expect(const std::string& key, const T& only) {
    const auto value = get<T>(key, only);
    check_config(
        value == only, file_, ": \"", key, "\" is ", Json(value).dump(),
        ", which is not supported; only ", Json(only).dump(), " is");
  }
  /// Throws if there is a field that was neither read nor is harmless.
  void check_all_read(const std::set<std::string>& harmless = {}) const {
    for (const auto& [key, value] : json_.items()) {
      check_config(
          read_.contains(key) || harmless.contains(key) || value.is_null(), file_, ": \"", key,
          "\": ", value.dump(), " is not known here; remove it if it does not change the model");
    }
  }
  const std::string& file() const {
    return file_;
  }

 private:
  Json json_;
  std::string file_;
  std::set<std::string> read_;
};

} // namespace fsdp::cli
