#include "cli/run_folder.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <ctime>

#include <fsdp/distributed.h>

#include "cli/check.h"

namespace fsdp::cli {

namespace {

/// runs/<date and time>, by the clock of rank 0. Collective.
std::string new_run_folder(const std::string& device) {
  char text[16] = {};
  const auto now = std::time(nullptr);
  tm local{};
  std::strftime(text, sizeof(text), "%Y%m%d-%H%M%S", localtime_r(&now, &local));
  const auto shared =
      torch::from_blob(text, {sizeof(text)}, torch::kByte).to(torch::Device(device));
  default_group().broadcast(shared, 0);
  const auto host = shared.to(torch::kCPU);
  return std::string("runs/") + static_cast<const char*>(host.const_data_ptr());
}

/// With all folders above it. By hand: see corpus.cpp.
void make_folders(const std::string& path) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const auto part = path.substr(0, end);
    struct stat info{};
    const bool made = mkdir(part.c_str(), 0777) == 0;
    const int error = errno;
    if (!made && !(stat(part.c_str(), &info) == 0 && S_ISDIR(info.st_mode))) {
      throw CheckpointError(
          {__func__, __FILE__, __LINE__},
          c10::str(part, " cannot be made a folder: ", std::strerror(error)));
    }
    if (end == std::string::npos) {
      return;
    }
  }
}

} // namespace

RunFolder::RunFolder(const TrainOptions& options, int64_t before) : options_(options) {
  if (!options.saves()) {
    return;
  }
  path_ = options.run.empty() ? new_run_folder(options.identity.config.device) : options.run;
  series_.emplace(checkpoints_of(path_), options.keep);
  std::string failure;
  try {
    if (get_rank() == 0) {
      make_folders(path_);
      write_file(path_ + "/config.json", resolved(options).dump(2) + "\n");
      metrics_.emplace(path_ + "/metrics.jsonl", before);
    }
  } catch (const CheckpointError& error) {
    failure = error.what_without_backtrace();
  }
  // Every rank ends alike, rather than waiting for rank 0.
  const auto failed =
      torch::full({1}, failure.empty() ? 0 : 1, torch::Device(options.identity.config.device));
  default_group().broadcast(failed, 0);
  if (failed.item<double>() != 0) {
    throw CheckpointError(
        {__func__, __FILE__, __LINE__},
        failure.empty() ? path_ + " cannot be written by rank 0" : failure);
  }
}

void RunFolder::add(const StepRecord& record) {
  if (metrics_) {
    metrics_->add(record);
  }
}

void RunFolder::after_step(Trainer& trainer, const RunState& run) {
  const auto every = options_.save_every;
  if (series_ && every > 0 && run.step % every == 0 && run.step < options_.identity.config.steps) {
    series_->async_save(run.step, make_run_state_dict(trainer, run, options_.identity));
  }
}

void RunFolder::at_end(Trainer& trainer, const RunState& run) {
  if (series_) {
    series_->save(run.step, make_run_state_dict(trainer, run, options_.identity));
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
