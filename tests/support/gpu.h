#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fsdp/comm.h>
#include <fsdp/distributed.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#ifdef FSDP_TEST_CUDA // torch has CUDA
#include <ATen/cuda/Sleep.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "process_group/gather_plan.h"
#include "process_group/observer.h"
#include "runtime/stream.h"

#define SKIP_WITHOUT_GPU()                  \
  if (!torch::cuda::is_available()) {       \
    GTEST_SKIP() << "there is no GPU here"; \
  }

namespace fsdp::test {

/// This rank's GPU.
inline torch::Device gpu() {
  return detail::current_device(torch::kCUDA);
}

inline c10::Stream gpu_stream() {
  return c10::impl::VirtualGuardImpl(torch::kCUDA).getStream(gpu());
}

/// A new stream. It is current for the calling rank while this object exists.
struct OwnStream {
  c10::impl::VirtualGuardImpl device{torch::kCUDA};
  c10::StreamGuard guard{device.getStreamFromGlobalPool(gpu())};
};

/// Joins a world, and leaves it at the end of the scope.
struct ScopedProcessGroup {
  explicit ScopedProcessGroup(const InitOptions& options) {
    init_process_group(options);
  }
  ~ScopedProcessGroup() {
    destroy_process_group();
  }
};

// ------------------------------------------------------------ Delays, and time

inline void spin([[maybe_unused]] int64_t cycles) {
#ifdef FSDP_TEST_CUDA
  at::cuda::sleep(cycles);
#else
  TORCH_CHECK(false, "this torch has no CUDA");
#endif
}

/// How many milliseconds the current stream needs for the work that `enqueue` gives it.
template <class Enqueue>
double gpu_ms(Enqueue enqueue) {
  torch::cuda::synchronize();
  c10::Event start(torch::kCUDA, c10::EventFlag::BACKEND_DEFAULT); // which records times
  c10::Event end(torch::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
  start.record(gpu_stream());
  enqueue();
  end.record(gpu_stream());
  torch::cuda::synchronize();
  return start.elapsedTime(end);
}

/// Keeps the current stream busy for `ms`. The clock's speed is measured in the first call.
inline void gpu_sleep(double ms) {
  static const double cycles_per_ms = [] {
    constexpr int64_t kCycles = 20'000'000;
    gpu_ms([] { spin(kCycles); }); // the clock gets faster under load
    return static_cast<double>(kCycles) / gpu_ms([] { spin(kCycles); });
  }();
  if (ms > 0) {
    spin(static_cast<int64_t>(ms * cycles_per_ms));
  }
}

/// The median of three measurements. Another one comes before them, to warm up.
template <class Enqueue>
double median_gpu_ms(Enqueue enqueue) {
  gpu_ms(enqueue);
  std::vector<double> times;
  for (int i = 0; i < 3; ++i) {
    times.push_back(gpu_ms(enqueue));
  }
  std::sort(times.begin(), times.end());
  return times[1];
}

inline double host_ms_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

/// Prints a line that scripts/gpu_check copies into its report.
template <class... Values>
void figure(const char* format, Values... values) {
  printf("figure: ");
  printf(format, values...);
  printf("\n");
  fflush(stdout);
}

// ------------------------------------------------------------ Delayed functions and collectives

/// Copies its input. Delays the stream in forward and in backward.
struct SleepFunction : torch::autograd::Function<SleepFunction> {
  static torch::Tensor forward(
      torch::autograd::AutogradContext* context,
      const torch::Tensor& x,
      double forward_ms,
      double backward_ms) {
    context->saved_data["ms"] = backward_ms;
    gpu_sleep(forward_ms);
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list grads) {
    gpu_sleep(context->saved_data["ms"].toDouble());
    return {grads[0].clone(), {}, {}};
  }
};

/// Delays the stream that the engine calls it on, before and after each gather.
struct DelayedAllGather : AllGather {
  Work operator()(
      at::Tensor& out, const at::Tensor& in, ProcessGroup& group, bool /*async_op*/) override {
    gpu_sleep(before_ms);
    auto work = group.all_gather_async(out, in);
    gpu_sleep(after_ms);
    return work;
  }
  double before_ms = 0;
  double after_ms = 0;
};

/// Sets whether gathers are placed on all ranks, while it exists.
struct PlacedGathers {
  explicit PlacedGathers(detail::PlaceGathers how)
      : before(detail::place_gathers().exchange(how)) {}
  ~PlacedGathers() {
    detail::place_gathers() = before;
  }
  PlacedGathers(const PlacedGathers&) = delete;
  PlacedGathers& operator=(const PlacedGathers&) = delete;
  const detail::PlaceGathers before;
};

/// Delays the stream of every gather that this thread starts, also of placed ones.
struct LateGathers : detail::CollectiveObserver {
  void on_collective(const detail::ObservedCollective& started) override {
    if (started.call.kind == detail::CollectiveKind::AllGather) {
      gpu_sleep(ms);
      num_placed += started.call.plan ? 1 : 0;
    }
  }
  double ms = 0;
  int num_placed = 0;
};

struct DelayedReduceScatter : ReduceScatter {
  Work operator()(
      at::Tensor& out,
      const at::Tensor& in,
      ProcessGroup& group,
      ReduceOp op,
      bool /*async_op*/) override {
    gpu_sleep(before_ms);
    auto work = group.reduce_scatter_async(out, in, op);
    gpu_sleep(after_ms);
    return work;
  }
  double before_ms = 0;
  double after_ms = 0;
};

} // namespace fsdp::test
