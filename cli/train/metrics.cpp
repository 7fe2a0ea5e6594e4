#include "cli/train/metrics.h"

#include <cmath>

#include "cli/files.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::ordered_json;

/// The value, or null if it is not finite: JSON has no NaN.
Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json();
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
    if (step >= 1 && step <= steps) {
      kept += line + "\n";
      if (json.contains("loss")) {
        losses_.push_back(json["loss"].is_number() ? json["loss"].get<double>() : std::nan(""));
      } else {
        validated_ = json["step"];
      }
    }
  }
  return kept;
}

Json to_json(const StepRecord& record) {
  const auto& [loss, grad_norm, lr, skipped, asked, memory] = record.result;
  Json json{
      {"step", record.step},
      {"loss", number(loss)},
      {"grad_norm", number(grad_norm)},
      {"lr", lr},
      {"tokens", record.tokens},
      {"seconds", record.seconds},
      {"tokens_per_s", record.tokens_per_s},
      {"exposed_s", record.exposed_s},
      {"memory",
       {{"shards", memory.shards},
        {"gathered", memory.gathered},
        {"gradients", memory.gradients},
        {"communication", memory.communication},
        {"other", memory.other},
        {"allocated", memory.allocated},
        {"peak", memory.peak}}}};
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
  write_file(path, lines_to_keep(steps));
  file_.open(path, std::ios::app);
  check();
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
