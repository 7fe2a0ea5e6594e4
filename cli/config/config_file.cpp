#include "cli/config/config_file.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <string_view>

#include "cli/check.h"
#include "cli/config/option_list.h"
#include "cli/files.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::ordered_json;

// Tables that are the value of an option. Other tables are sections.
const std::set<std::string> kTables{"mesh"};

/// The options that --model or --from decides, and `more`.
std::set<std::string> model_options_and(const std::string& more) {
  std::set<std::string> names{"from", more};
  for_each_model_option([&](const char* name, auto, bool) { names.insert(name); });
  return names;
}

/// For an option of the command line: the options of a config file that contradict it, and are
/// therefore dropped.
const std::map<std::string, std::set<std::string>> kContradictedOptions{
    {"quiet", {"json"}},
    {"json", {"quiet"}},
    {"run", {"no-save"}},
    {"save-every", {"no-save"}},
    {"csv", {"no-save"}},
    {"tensorboard", {"no-save"}},
    {"no-save", {"run", "save-every", "csv", "tensorboard"}},
    {"resume", {"model"}},
    {"mesh", {"ranks"}},
    {"model", model_options_and("lora")},
    {"from", model_options_and("model")}};

constexpr int64_t kMostBytes = 1 << 20;
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF"; // some editors begin a file with it

/// Throws ConfigError if a line is not text: messages quote parts of the file.
void check_text(const std::string& path, const std::string& text) {
  std::istringstream lines(text);
  int64_t number = 1;
  for (std::string line; std::getline(lines, line); ++number) {
    bool is_text = std::all_of(line.begin(), line.end(), [](unsigned char c) {
      return !std::iscntrl(c) || c == '\t' || c == '\r';
    });
    try {
      (void)Json(line).dump(); // throws if the line is not UTF-8
    } catch (const Json::exception&) {
      is_text = false;
    }
    check_config(
        is_text, "--config: ", path, ", line ", number,
        " has bytes that are not text; the file must be JSON or TOML, in UTF-8");
  }
}

/// The line of the file that sets an option: 1 is the first. 0 if there is none.
int64_t line_of(const std::string& name, const std::string& text) {
  std::istringstream lines(text);
  int64_t number = 1;
  for (std::string line; std::getline(lines, line); ++number) {
    std::replace(line.begin(), line.end(), '_', '-');
    for (size_t at = line.find(name); at != std::string::npos; at = line.find(name, at + 1)) {
      const auto before = at == 0 ? std::string::npos : line.find_last_of(" \t\"{[,.", at - 1);
      const auto after = line.find_first_not_of("\" \t\r]", at + name.size());
      const bool is_whole =
          (at == 0 || before == at - 1) &&
          (after == std::string::npos || line[after] == '=' || line[after] == ':');
      if (is_whole) {
        return number;
      }
    }
  }
  return 0;
}

std::string read(const std::string& path) {
  check_config(!path.empty(), "--config: it needs the name of a file");
  check_config(!is_folder(path), "--config: ", path, " is a folder, not a file");
  struct stat info{};
  const bool exists = stat(path.c_str(), &info) == 0;
  check_config(
      !exists || S_ISREG(info.st_mode), "--config: ", path,
      " is a device or a pipe, which may have no end; write the options to a file");
  check_config(
      !exists || info.st_size <= kMostBytes, "--config: ", path, " has ", info.st_size,
      " bytes; a file of options has at most ", kMostBytes);
  auto text = read_file(path);
  check_config(text.has_value(), "--config: ", path, " cannot be read: ", std::strerror(errno));
  if (text->starts_with(kByteOrderMark)) {
    text->erase(0, kByteOrderMark.size());
  }
  check_text(path, *text);
  return *text;
}

/// Returns "--name" for "--name=value". Empty if the word is not an option.
std::string option_in(const std::string& word) {
  return word.starts_with("--") ? word.substr(0, word.find('=')) : "";
}

/// Adds "--name=value". An empty value becomes a word of its own, because CLI11 would take the word
/// after "--name=" as the value.
void add_word(std::vector<std::string>& words, std::string name, const std::string& value) {
  std::replace(name.begin(), name.end(), '_', '-');
  if (value.empty()) {
    words.insert(words.end(), {"--" + name, ""});
  } else {
    words.push_back("--" + name + "=" + value);
  }
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const auto& part : parts) {
    text += (text.empty() ? "" : ",") + part;
  }
  return text;
}

/// The value as a user would type it on the command line.
std::string command_line_text(const Json& value) {
  std::vector<std::string> parts;
  if (value.is_array()) {
    for (const auto& item : value) {
      parts.push_back(command_line_text(item));
    }
    return joined(parts);
  }
  if (value.is_object()) {
    for (const auto& [name, item] : value.items()) {
      parts.push_back(name + "=" + command_line_text(item));
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
      add_word(words, name, command_line_text(value));
    }
  }
}

void add_toml(std::vector<std::string>& words, const std::string& text) {
  std::istringstream stream(text);
  std::map<std::string, std::vector<std::string>> tables;
  for (const auto& item : CLI::ConfigTOML().from_config(stream)) {
    if (item.name == "++" || item.name == "--") {
      continue; // CLI11 marks the beginning and the end of a section
    }
    if (!item.parents.empty() && kTables.contains(item.parents.back())) {
      tables[item.parents.back()].push_back(item.name + "=" + joined(item.inputs));
    } else {
      add_word(words, item.name, joined(item.inputs));
    }
  }
  for (const auto& [name, parts] : tables) {
    add_word(words, name, joined(parts));
  }
}

/// Removes the shard axis: returns "dp=2" for "dp=2,shard=4".
std::string without_shard(const std::string& mesh) {
  std::vector<std::string> parts;
  std::istringstream stream(mesh);
  for (std::string part; std::getline(stream, part, ',');) {
    if (!part.starts_with("shard=")) {
      parts.push_back(part);
    }
  }
  return joined(parts);
}

/// The options of the file, without those that contradict the command line.
std::vector<std::string> without_contradicted(
    const std::vector<std::string>& of_file, const std::vector<std::string>& command_line) {
  std::set<std::string> dropped;
  bool ranks_given = false;
  for (const auto& word : command_line) {
    const auto name = option_in(word);
    const auto contradicted =
        kContradictedOptions.find(name.substr(std::min<size_t>(2, name.size())));
    if (contradicted != kContradictedOptions.end() && !word.ends_with("=false")) {
      dropped.insert(contradicted->second.begin(), contradicted->second.end());
    }
    ranks_given |= name == "--ranks";
  }
  std::vector<std::string> words;
  for (size_t i = 0; i < of_file.size(); ++i) {
    const auto option = option_in(of_file[i]);
    const bool alone = option.size() == of_file[i].size(); // the next word is its empty value
    if (dropped.contains(option.substr(std::min<size_t>(2, option.size())))) {
      i += alone ? 1 : 0;
    } else if (option == "--mesh" && ranks_given && !alone) {
      const auto others = without_shard(of_file[i].substr(option.size() + 1));
      if (!others.empty()) {
        add_word(words, "mesh", others);
      }
    } else {
      words.push_back(of_file[i]);
    }
  }
  return words;
}

} // namespace

std::string ConfigOrigins::named(const std::string& message) const {
  const auto start = message.find("--");
  const auto end = message.find_first_of(" =:,;", std::min(start, message.size()));
  const auto origin =
      start == std::string::npos ? origins.end() : origins.find(message.substr(start, end - start));
  return origin == origins.end() ? message : origin->second + ": " + message;
}

std::vector<std::string> config_words(const std::string& path, ConfigOrigins* origins) {
  const auto text = read(path);
  std::vector<std::string> words;
  const auto first = text.find_first_not_of(" \t\r\n");
  const bool is_object = first != std::string::npos && text[first] == '{';
  check_config(
      is_object || !Json::accept(text), "--config: ", path,
      " is JSON, but not an object with the names of options");
  try {
    if (is_object) {
      add_json(words, Json::parse(text, nullptr, /*allow_exceptions=*/true, /*comments=*/true));
    } else {
      add_toml(words, text);
    }
  } catch (const Json::exception& error) {
    throw_config_error("--config: ", path, " is not JSON: ", error.what());
  } catch (const CLI::Error& error) {
    throw_config_error("--config: ", path, " is not TOML: ", error.what());
  }
  for (const auto& word : words) {
    const auto option = option_in(word);
    check_config(option != "--config", "--config: ", path, " must not name another config file");
    if (origins && !option.empty()) {
      const auto line = line_of(option.substr(2), text);
      origins->origins[option] = path + (line > 0 ? ", line " + std::to_string(line) : "");
    }
  }
  return words;
}

std::vector<std::string> expand_config(
    const std::vector<std::string>& words, ConfigOrigins* origins) {
  std::vector<std::string> of_file;
  std::vector<std::string> others;
  for (size_t i = 0; i < words.size(); ++i) {
    std::string path;
    if (words[i] == "--config") {
      check_config(i + 1 < words.size(), "--config: it needs the name of a file");
      path = words[++i];
    } else if (words[i].starts_with("--config=")) {
      path = words[i].substr(9);
    } else {
      const auto name = option_in(words[i]);
      if (!name.empty() && words[i] == name + "=") {
        add_word(others, name.substr(2), "");
      } else {
        others.push_back(words[i]);
      }
      continue;
    }
    const auto more = config_words(path, origins);
    of_file.insert(of_file.end(), more.begin(), more.end());
  }
  for (const auto& word : others) {
    if (origins) {
      origins->origins.erase(option_in(word)); // the command line wins
    }
  }
  auto result = without_contradicted(of_file, others);
  result.insert(result.end(), others.begin(), others.end());
  return result;
}

} // namespace fsdp::cli
