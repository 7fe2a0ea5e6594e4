#include "cli/train/metrics.h"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <ctime>

#include "cli/files.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::ordered_json;

/// The value, or null if it is not finite: JSON has no NaN.
Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json();
}

/// Seconds since the file was written. 0 if there is none.
double age_of(const std::filesystem::path& path) {
  struct stat status{};
  return stat(path.c_str(), &status) == 0
             ? std::max(0.0, std::difftime(std::time(nullptr), status.st_mtime))
             : 0.0;
}

} // namespace

/// The lines of steps up to `steps`, without a line that a crash has cut off.
std::string MetricsFile::lines_to_keep(int64_t steps) {
  std::string kept;
  std::ifstream file(path_);
  for (std::string line; std::getline(file, line);) {
    const auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool has_step =
        json.is_object() && json.contains("step") && json["step"].is_number_integer();
    const auto step = has_step ? json["step"].get<int64_t>() : 0;
    const bool is_step = has_step && json.contains("loss");
    if (has_step && step <= steps) {
      kept += line + "\n";
      if (is_step) {
        losses_.push_back(json["loss"].is_number() ? json["loss"].get<double>() : std::nan(""));
      } else if (json.contains("validation_loss")) {
        validated_ = step;
      }
    } else if (is_step) {
      ++lost_.steps;
      lost_.seconds += json.value("seconds", 0.0);
    }
  }
  return kept;
}

Json to_json(const StepRecord& record) {
  const auto& [loss, grad_norm, lr, skipped, memory] = record.result;
  Json json{
      {"step", record.step},
      {"loss", number(loss)},
      {"grad_norm", number(grad_norm)},
      {"lr", lr},
      {"tokens", record.tokens},
      {"seconds", record.seconds},
      {"tokens_per_s", record.tokens_per_s},
      {"exposed_s", number(record.exposed_s)},
      {"flops_per_s", number(record.flops_per_s)},
      {"memory",
       {{"shards", memory.shards},
        {"gathered", memory.gathered},
        {"gradients", memory.gradients},
        {"communication", memory.communication},
        {"other", memory.other},
        {"allocated", memory.allocated},
        {"peak", memory.peak}}}};
  if (record.utilisation) {
    json["mfu"] = *record.utilisation;
  }
  if (skipped) {
    json["skipped"] = true;
  }
  return json;
}

Json to_json(const Validation& validation) {
  return {
      {"step", validation.step},
      {"validation_loss", number(validation.loss)},
      {"byte_frequency_loss", validation.byte_frequency_loss}};
}

MetricsFile::MetricsFile(const std::filesystem::path& path, int64_t steps) : path_(path) {
  const auto age = age_of(path);
  write_file(path, lines_to_keep(steps));
  file_.open(path, std::ios::app);
  check();
  if (lost_.steps > 0) {
    lost_.seconds += age;
    add({{"step", steps}, {"lost_steps", lost_.steps}, {"lost_seconds", lost_.seconds}});
  }
}

void MetricsFile::add(const Json& line) {
  file_ << line.dump() << std::endl; // flushes, so that readers see the line at once
  check();
}

void MetricsFile::check() const {
  if (!file_) {
    throw_cannot_write(path_);
  }
}

} // namespace fsdp::cli
