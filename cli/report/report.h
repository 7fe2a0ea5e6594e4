#pragma once

#include <filesystem>

namespace fsdp::cli {

/// The files of a run's folder; see docs/run_folder.md.
inline constexpr const char* kConfigFile = "config.json";
inline constexpr const char* kMetricsFile = "metrics.jsonl";
inline constexpr const char* kGroupsFile = "groups.json";
inline constexpr const char* kTraceFile = "trace.json";
inline constexpr const char* kReportFile = "report.html";

/// Writes report.html from the files in a run's folder and returns its path. The page needs no
/// other files. Only the metrics are required, and their last line may be cut off. Damaged files
/// and lines are left out and named on stderr. Throws ConfigError if there are no metrics, and
/// CheckpointError if the page cannot be written. Not collective: only one rank calls it.
std::filesystem::path write_report(const std::filesystem::path& run);

} // namespace fsdp::cli
