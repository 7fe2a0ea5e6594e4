#pragma once

#include <nlohmann/json.hpp>

#include <filesystem>
#include <string>

#include "cli/files.h"

namespace fsdp::cli {

/// What is wrong with a JSON text, without the library's name for it in brackets.
inline std::string json_problem(const nlohmann::json::exception& error) {
  const std::string what = error.what();
  const auto end = what.find("] ");
  return what.starts_with("[json.exception.") && end != std::string::npos ? what.substr(end + 2)
                                                                          : what;
}

/// The object in a small JSON file. An empty one if there is no such file, or if it holds anything
/// else.
inline nlohmann::json read_object(const std::filesystem::path& path) {
  auto json =
      nlohmann::json::parse(read_file(path).value_or("{}"), nullptr, /*allow_exceptions=*/false);
  return json.is_object() ? json : nlohmann::json::object();
}

} // namespace fsdp::cli
