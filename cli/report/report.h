#pragma once

#include <filesystem>

namespace fsdp::cli {

/// The files of a run's folder; see docs/run_folder.md.
inline constexpr const char* kConfigFile = "config.json";
inline constexpr const char* kMetricsFile = "metrics.jsonl";
inline constexpr const char* kGroupsFile = "groups.json";
inline constexpr const char* kTraceFile = "trace.json";
inline constexpr const char* kReportFile = "report.html";

/// Makes one page, which needs nothing else, of what lies in a run's folder, and
/// returns its path. Files other than the metrics may be missing, and a metric's
/// last line may be cut off; what is damaged is left out, and named on stderr. Throws
/// ConfigError where there are no metrics, CheckpointError where the page cannot be
/// written. Not collective: for one rank.
std::filesystem::path write_report(const std::filesystem::path& run);

} // namespace fsdp::cli
