#include "cli/train/run_folder.h"

#include <sys/stat.h>

#include <cerrno>
#include <ctime>
#include <iostream>

#include <fsdp/distributed.h>

#include "cli/check.h"
#include "cli/files.h"
#include "cli/report/report.h"

namespace fsdp::cli {

namespace {

constexpr int64_t kLongestText = 1024;

/// Broadcasts a text from rank 0, cut off at kLongestText bytes. Collective.
std::string from_first_rank(std::string text, const std::string& device) {
  text.resize(kLongestText); // padded with zeros; the last byte must be one
  text.back() = '\0';
  const auto bytes = torch::from_blob(text.data(), {kLongestText}, torch::kByte);
  const auto shared = bytes.to(torch::Device(device), /*non_blocking=*/false, /*copy=*/true);
  default_group().broadcast(shared, 0);
  bytes.copy_(shared);
  return text.c_str();
}

/// Makes runs/<date and time> on rank 0 and returns its path on every rank. If that folder exists,
/// because another run began in the same second, a number is appended. Collective.
std::string new_run_folder(const std::string& device) {
  std::string path;
  if (get_rank() == 0) {
    char text[16] = {};
    const auto now = std::time(nullptr);
    tm local{};
    std::strftime(text, sizeof(text), "%Y%m%d-%H%M%S", localtime_r(&now, &local));
    const auto first = std::string("runs/") + text;
    path = first;
    mkdir("runs", 0777); // make_folders reports an error
    for (int i = 2; mkdir(path.c_str(), 0777) != 0 && errno == EEXIST; ++i) {
      path = first + "-" + std::to_string(i);
    }
  }
  return from_first_rank(path, device);
}

} // namespace

RunFolder::RunFolder(
    const TrainOptions& options, const Plan& plan, c10::Device device, int64_t before)
    : options_(options) {
  if (!options.saves()) {
    return;
  }
  path_ = options.run.empty() ? new_run_folder(options.identity.config.device) : options.run;
  series_.emplace(checkpoints_of(path_), options.keep);
  std::string failure;
  if (get_rank() == 0) {
    try {
      make_folders(path_);
      const std::filesystem::path folder = path_;
      write_file(folder / kConfigFile, config_json(options).dump(2) + "\n");
      write_file(folder / kGroupsFile, groups_json(plan).dump(1) + "\n");
      metrics_.emplace(folder / kMetricsFile, before);
    } catch (const CheckpointError& error) {
      failure = error.what_without_backtrace();
    }
  }
  // Every rank throws the error of rank 0, so that none waits for rank 0.
  failure = from_first_rank(failure, options.identity.config.device);
  if (!failure.empty()) {
    throw CheckpointError({__func__, __FILE__, __LINE__}, failure);
  }
  trace_.emplace(path_, before, options.identity.config.steps, device);
}

void RunFolder::before_step(int64_t step) {
  if (trace_) {
    trace_->begin_step(step + 1);
  }
}

void RunFolder::add(const StepRecord& record) {
  if (metrics_) {
    metrics_->add(to_json(record));
  }
}

void RunFolder::add(const Validation& validation) {
  if (metrics_ && !metrics_->has_validation(validation.step)) { // a finished run has one
    metrics_->add(to_json(validation));
  }
}

void RunFolder::after_step(Trainer& trainer, const RunState& run) {
  const auto every = options_.save_every.value_or(0);
  if (series_ && every > 0 && run.step % every == 0 && run.step < options_.identity.config.steps) {
    series_->async_save(run.step, make_run_state_dict(trainer, run, options_.identity));
  }
}

void RunFolder::at_end(Trainer& trainer, const RunState& run) {
  if (trace_) {
    trace_->end();
  }
  if (series_) {
    const auto state = make_run_state_dict(trainer, run, options_.identity);
    try {
      series_->save(run.step, state);
    } catch (const CheckpointError& error) { // maybe of an earlier async save, so try again
      if (get_rank() == 0) {
        std::cerr << "fsdp: saving failed, trying again: " << error.what_without_backtrace()
                  << std::endl;
      }
      series_->save(run.step, state);
    }
  }
}

void RunFolder::report() {
  try {
    if (metrics_) {
      write_report(path_);
    }
  } catch (const c10::Error& error) { // only the report is missing: the run's data is on disk
    std::cerr << "fsdp: no report: " << error.what_without_backtrace() << std::endl;
  }
}

std::string RunFolder::latest() const {
  const auto found = series_ ? series_->latest() : std::nullopt;
  return found ? found->string() : "";
}

std::vector<double> RunFolder::earlier_losses() const {
  return metrics_ ? metrics_->earlier_losses() : std::vector<double>();
}

} // namespace fsdp::cli
