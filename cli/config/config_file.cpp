#include "cli/config/config_file.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "cli/check.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::ordered_json;

// The tables that are values, not sections.
const std::set<std::string> kTables{"mesh"};

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  check_config(
      file.is_open() && !file.bad(), "--config: ", path, " cannot be read: ", std::strerror(errno));
  return text.str();
}

std::string word(std::string name, const std::string& value) {
  std::replace(name.begin(), name.end(), '_', '-');
  return "--" + name + "=" + value;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const auto& part : parts) {
    text += (text.empty() ? "" : ",") + part;
  }
  return text;
}

/// As it would be typed.
std::string typed(const Json& value) {
  std::vector<std::string> parts;
  if (value.is_array()) {
    for (const auto& item : value) {
      parts.push_back(typed(item));
    }
    return joined(parts);
  }
  if (value.is_object()) {
    for (const auto& [name, item] : value.items()) {
      parts.push_back(name + "=" + typed(item));
    }
    return joined(parts);
  }
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void add_json(std::vector<std::string>& words, const Json& object) {
  for (const auto& [name, value] : object.items()) {
    if (value.is_object() && !kTables.contains(name)) {
      add_json(words, value);
    } else if (!value.is_null()) {
      words.push_back(word(name, typed(value)));
    }
  }
}

void add_toml(std::vector<std::string>& words, const std::string& text) {
  std::istringstream stream(text);
  std::map<std::string, std::vector<std::string>> tables;
  for (const auto& item : CLI::ConfigTOML().from_config(stream)) {
    if (item.name == "++" || item.name == "--") {
      continue; // CLI11's marks of a section
    }
    if (!item.parents.empty() && kTables.contains(item.parents.back())) {
      tables[item.parents.back()].push_back(item.name + "=" + joined(item.inputs));
    } else {
      words.push_back(word(item.name, joined(item.inputs)));
    }
  }
  for (const auto& [name, parts] : tables) {
    words.push_back(word(name, joined(parts)));
  }
}

} // namespace

std::vector<std::string> config_words(const std::string& path) {
  const auto text = read(path);
  std::vector<std::string> words;
  const auto first = text.find_first_not_of(" \t\r\n");
  try {
    if (first != std::string::npos && text[first] == '{') {
      add_json(words, Json::parse(text, nullptr, /*allow_exceptions=*/true, /*comments=*/true));
    } else {
      add_toml(words, text);
    }
  } catch (const Json::exception& error) {
    refuse("--config: ", path, " is not JSON: ", error.what());
  } catch (const CLI::Error& error) {
    refuse("--config: ", path, " is not TOML: ", error.what());
  }
  for (const auto& each : words) {
    check_config(
        each.rfind("--config=", 0) != 0, "--config: ", path,
        " names a file itself; only one counts");
  }
  return words;
}

std::vector<std::string> expand_config(const std::vector<std::string>& words) {
  std::vector<std::string> of_file;
  std::vector<std::string> others;
  for (size_t i = 0; i < words.size(); ++i) {
    std::string path;
    if (words[i] == "--config") {
      check_config(i + 1 < words.size(), "--config: it needs the name of a file");
      path = words[++i];
    } else if (words[i].rfind("--config=", 0) == 0) {
      path = words[i].substr(9);
    } else {
      others.push_back(words[i]);
      continue;
    }
    const auto more = config_words(path);
    of_file.insert(of_file.end(), more.begin(), more.end());
  }
  of_file.insert(of_file.end(), others.begin(), others.end());
  return of_file;
}

} // namespace fsdp::cli
