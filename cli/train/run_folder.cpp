#include "cli/train/run_folder.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <ctime>
#include <iostream>

#include <fsdp/distributed.h>

#include "cli/check.h"
#include "cli/files.h"
#include "cli/report/report.h"
#include "cli/train/signals.h"

namespace fsdp::cli {

namespace {

constexpr const char* kCsvFile = "metrics.csv";
constexpr const char* kEventsFolder = "tensorboard";

/// Makes runs/<date and time> on rank 0 and returns its path on every rank. If that folder exists,
/// because another run began in the same second, a number is appended. Collective.
std::string new_run_folder() {
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
  return gather_texts(path).front();
}

/// Calls `action` on rank 0. If it throws CheckpointError, every rank throws it, so that none waits
/// for rank 0.
template <class Action>
void on_first_rank(const Action& action) {
  std::string failure;
  if (get_rank() == 0) {
    try {
      action();
    } catch (const CheckpointError& error) {
      failure = error.what_without_backtrace();
    }
  }
  failure = gather_texts(failure).front();
  if (!failure.empty()) {
    throw_checkpoint_error(failure);
  }
}

/// Gives a save the time that writing takes, before a signal ends it.
void expect_save(const Trainer& trainer) {
  constexpr double kBytesPerSecond = 50e6;      // of a slow disk
  const auto state = 5 * trainer.shard_bytes(); // at most: in bf16, with moments in fp32
  StopSignals::expect_within(static_cast<double>(state) / kBytesPerSecond);
}

} // namespace

RunFolder::RunFolder(const TrainOptions& options) : options_(options) {
  if (!options.saves()) {
    return;
  }
  path_ = options.run.empty() ? new_run_folder() : options.run;
  series_.emplace(checkpoints_of(path_), options.keep);
  on_first_rank([&] {
    make_folders(path_);
    lock_.emplace(path_);
  });
}

void RunFolder::begin(const Plan& plan, c10::Device device, int64_t before) {
  if (!exists()) {
    return;
  }
  on_first_rank([&] {
    const std::filesystem::path folder = path_;
    write_file(folder / kConfigFile, config_json(options_).dump(2) + "\n");
    write_file(folder / kGroupsFile, groups_json(plan).dump(1) + "\n");
    metrics_.emplace(folder / kMetricsFile, before);
    std::remove((folder / kCsvFile).c_str()); // of an earlier run here
    if (options_.csv) {
      csv_.emplace(folder / kCsvFile, folder / kMetricsFile);
    }
    if (options_.tensorboard) {
      events_.emplace(folder / kEventsFolder, folder / kMetricsFile, before);
    }
  });
  trace_.emplace(path_, before, options_.identity.config.steps, device);
  recovered_at_ = before + std::stoll(gather_texts(std::to_string(lost().steps)).front());
}

void RunFolder::before_step(int64_t step) {
  if (trace_) {
    trace_->begin_step(step + 1);
  }
}

void RunFolder::add_line(const nlohmann::ordered_json& line) {
  metrics_->add(line);
  if (csv_) {
    csv_->add(line);
  }
  if (events_) {
    events_->add(line);
  }
}

void RunFolder::add(const StepRecord& record) {
  if (metrics_) {
    add_line(to_json(record));
  }
}

void RunFolder::add(const Validation& validation) {
  if (metrics_ && !metrics_->has_validation(validation.step)) { // a finished run has one
    add_line(to_json(validation));
  }
}

void RunFolder::after_step(Trainer& trainer, const RunState& run) {
  const auto every = options_.save_every.value_or(0);
  const bool is_due = every > 0 && (run.step % every == 0 || run.step == recovered_at_);
  if (series_ && is_due && run.step < options_.identity.config.steps) {
    expect_save(trainer);
    series_->async_save(run.step, make_run_state_dict(trainer, run, options_.identity));
  }
}

void RunFolder::at_end(Trainer& trainer, const RunState& run) {
  if (trace_) {
    trace_->end();
  }
  if (series_) {
    expect_save(trainer);
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
