// `fsdp report`: makes one page from the files in a run's folder.
#include "cli/report/report.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <iostream>
#include <iterator>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fsdp/version.h>

#include "cli/check.h"
#include "cli/files.h"
#include "cli/report/report_page.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

// The most steps on the page. Of a longer run it shows every second, third, ... step.
constexpr size_t kMostSteps = 20'000;

/// Nothing if there is no such file. Throws ConfigError if it cannot be read.
std::optional<std::string> read_text(const fs::path& path) {
  auto text = read_file(path);
  check_config(text || errno == ENOENT, "cannot read ", path.string());
  return text;
}

void warn(const std::string& what) {
  std::cerr << "fsdp: " << what << std::endl;
}

/// Parses the file and returns the result of `make`. Returns null if the file is missing or
/// damaged, because the page can be made from the other parts.
template <class Make>
Json read_json_part(const fs::path& path, Make make) {
  try {
    const auto text = read_text(path);
    if (!text) {
      return nullptr;
    }
    return make(Json::parse(*text));
  } catch (const Json::exception& error) {
    warn(c10::str(
        path.string(), " is damaged, and left out of the page: ", error.what(),
        "; remove or repair it"));
  } catch (const ConfigError& error) {
    warn(c10::str(error.what_without_backtrace(), "; it is left out of the page"));
  }
  return nullptr;
}

Json checked_options(Json json) {
  check_config(json.is_object(), kConfigFile, " is not an object of options");
  return json;
}

bool is_group(const Json& json) {
  const auto has_number = [&](const char* key) {
    return json.contains(key) && json[key].is_number();
  };
  return json.is_object() && has_number("numel") && has_number("shard_bytes") &&
         has_number("gathered_bytes") && has_number("padding_bytes");
}

Json checked_groups(Json json) {
  check_config(
      json.is_array() && std::ranges::all_of(json, is_group), kGroupsFile,
      " is not a list of groups");
  return json;
}

/// The metrics in the order of their steps. A resumed run repeats the steps after its checkpoint,
/// so the last line of a step counts.
Json read_metrics(const fs::path& path) {
  const auto text = read_text(path);
  check_config(
      text.has_value(), path.parent_path().string(), " is not the folder of a run: it has no ",
      kMetricsFile);
  // By step and kind: 0 is an update, 1 a validation, and every interruption has its own number.
  std::map<std::pair<int64_t, size_t>, Json> lines;
  std::istringstream input(*text);
  size_t number = 0;
  size_t bad = 0; // number of the first line that is not a metric
  size_t num_bad = 0;
  for (std::string line; std::getline(input, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == line.npos) {
      continue;
    }
    auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_discarded() && input.peek() == EOF) {
      break; // the run was killed while it wrote this
    }
    if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer()) {
      bad = bad == 0 ? number : bad;
      ++num_bad;
      continue;
    }
    const size_t kind = json.contains("lost_steps")        ? 1 + number
                        : json.contains("validation_loss") ? 1
                                                           : 0;
    lines.insert_or_assign({json["step"].get<int64_t>(), kind}, std::move(json));
  }
  if (num_bad > 0) {
    const auto what = c10::str(path.string(), " line ", bad, " is not an object with a step");
    check_config(!lines.empty(), what);
    warn(c10::str(
        what, num_bad > 1 ? c10::str(", nor are ", num_bad - 1, " more") : "", "; left out"));
  }
  const auto every = lines.size() / kMostSteps + 1;
  auto result = Json::array();
  size_t index = 0;
  for (auto& [key, json] : lines) {
    if (key.second > 0 || index++ % every == 0) {
      result.push_back(std::move(json));
    }
  }
  return result;
}

bool is_slice(const Json& event) {
  return event.is_object() && event.value("ph", "") == "X" && event.contains("ts") &&
         event.contains("dur");
}

double end_of(const Json& slice) {
  return slice.at("ts").get<double>() + slice.at("dur").get<double>();
}

/// Chooses the step of median length on the lowest rank. If there are more than two, the first one
/// does not count, because it prepares things.
int64_t choose_step(std::vector<Json> steps) {
  const auto rank_of = [](const Json& step) { return step.at("pid").get<int64_t>(); };
  const auto lowest = rank_of(*std::ranges::min_element(steps, {}, rank_of));
  std::erase_if(steps, [&](const Json& step) { return rank_of(step) != lowest; });
  if (steps.size() > 2) {
    steps.erase(steps.begin());
  }
  std::ranges::stable_sort(
      steps, {}, [](const Json& step) { return step.at("dur").get<double>(); });
  return steps[(steps.size() - 1) / 2].at("args").at("step");
}

/// The events of one step of a trace. Null if the trace has no step.
Json events_of_one_step(const Json& trace) {
  if (!trace.is_object() || !trace.contains("traceEvents")) {
    return nullptr;
  }
  const auto& events = trace.at("traceEvents");
  std::vector<Json> steps;
  std::copy_if(events.begin(), events.end(), std::back_inserter(steps), [](const auto& event) {
    return is_slice(event) && event.value("cat", "") == "step";
  });
  if (steps.empty()) {
    return nullptr;
  }
  const auto chosen = choose_step(steps);
  std::erase_if(steps, [&](const auto& step) { return step.at("args").at("step") != chosen; });
  double begin = steps[0].at("ts");
  double end = end_of(steps[0]);
  for (const auto& step : steps) {
    begin = std::min(begin, step.at("ts").template get<double>());
    end = std::max(end, end_of(step));
  }
  std::map<int64_t, Json> before; // by rank: the last count of memory before the step
  auto result = Json(std::move(steps));
  for (const auto& event : events) {
    if (is_slice(event) && event.value("cat", "") != "step") {
      if (end_of(event) > begin && event.at("ts") < end) {
        result.push_back(event);
      }
    } else if (event.value("ph", "") == "C" && event.at("ts") < end) {
      if (event.at("ts") < begin) {
        before[event.at("pid").get<int64_t>()] = event;
      } else {
        result.push_back(event);
      }
    }
  }
  for (auto& [rank, event] : before) {
    result.push_back(std::move(event));
  }
  return result;
}

void replace(std::string& text, std::string_view mark, std::string_view value) {
  const auto at = text.find(mark);
  TORCH_INTERNAL_ASSERT(at != text.npos);
  text.replace(at, mark.size(), value);
}

/// JSON for a script element. '<' is escaped, so that no text can end the element.
std::string script_text(const Json& json) {
  auto text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  c10::ReplaceAll(text, "<", "\\u003c");
  return text;
}

} // namespace

fs::path write_report(const fs::path& run) {
  check_config(is_folder(run), "there is no folder ", run.string());
  auto metrics = read_metrics(run / kMetricsFile);
  const Json data{
      {"name", fs::path(real_path(run.string())).filename().string()},
      {"version", c10::str(FSDP_VERSION_MAJOR, ".", FSDP_VERSION_MINOR, ".", FSDP_VERSION_PATCH)},
      {"config", read_json_part(run / kConfigFile, checked_options)},
      {"metrics", std::move(metrics)},
      {"groups", read_json_part(run / kGroupsFile, checked_groups)},
      {"trace", read_json_part(run / kTraceFile, events_of_one_step)}};
  std::string page(kReportPage);
  replace(page, "@REPORT_SCRIPT@", kReportScript);
  replace(page, "@REPORT_DATA@", script_text(data));
  const auto path = run / kReportFile;
  write_file(path, page);
  return path;
}

} // namespace fsdp::cli
