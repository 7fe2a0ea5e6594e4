#include "cli/train/step_trace.h"

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <utility>

#include <fsdp/distributed.h>
#include <fsdp/error.h>

#include "cli/report/report.h"

namespace fsdp::cli {

namespace {

constexpr int64_t kTraced = 3;
constexpr int64_t kWarmUp = 10;

} // namespace

StepTrace::StepTrace(std::string folder, int64_t before, int64_t steps, c10::Device device)
    : folder_(std::move(folder)), device_(device) {
  const auto spare = std::max<int64_t>(0, steps - before - kTraced);
  first_ = before + 1 + std::min(kWarmUp, spare / 2);
}

void StepTrace::begin_step(int64_t step) {
  if (step == first_) {
    trace_.emplace(TraceOptions{.device = device_});
  } else if (step == first_ + kTraced) {
    end();
  }
  if (trace_) {
    trace_->begin_step(step);
  }
}

void StepTrace::end() {
  if (!trace_) {
    return;
  }
  try {
    trace_->write(std::filesystem::path(folder_) / kTraceFile);
  } catch (const CommError&) {
    throw;
  } catch (const c10::Error& error) { // every rank catches it, and training goes on
    if (get_rank() == 0) {
      std::cerr << "fsdp: no timeline: " << error.what_without_backtrace() << std::endl;
    }
  }
  trace_.reset();
}

} // namespace fsdp::cli
