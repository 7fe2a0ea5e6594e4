#include "cli/train/signals.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <iostream>

#include "cli/check.h"

namespace fsdp::cli {

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Ticks = Clock::rep; // since the clock's beginning

constexpr auto kPoll = milliseconds(50);
constexpr auto kPatience = milliseconds(4000);

// What a signal handler touches must be lock-free.
std::atomic<int> first_signal{0};
std::atomic<Ticks> signal_came{0}; // 0: none came
std::atomic<Ticks> last_sign_of_life{0};
std::atomic<Ticks> patience{0}; // 0: a signal ends the process at once
std::atomic<bool> ends{false};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<Ticks>::is_always_lock_free);
int wake_fd = -1; // wakes the watching thread

Ticks now() {
  return Clock::now().time_since_epoch().count();
}

void wake_watcher() {
  const uint64_t one = 1;
  (void)!write(wake_fd, &one, sizeof(one));
}

void on_signal(int signal) {
  const int error = errno;
  Ticks first = 0;
  if (signal_came.compare_exchange_strong(first, now())) {
    first_signal = signal;
    wake_watcher();
  } else if (now() - first > Clock::duration(kSameSignal).count()) {
    _exit(128 + signal);
  }
  errno = error;
}

void handle(int signal, void (*handler)(int)) {
  struct sigaction action{};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART; // the system calls of ranks are not interrupted
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
}

} // namespace

StopSignals::StopSignals() {
  first_signal = 0;
  signal_came = 0;
  ends = false;
  patience = 0;
  wake_fd = eventfd(0, EFD_CLOEXEC);
  watcher_ = std::thread(watch);
  handle(SIGINT, on_signal);
  handle(SIGTERM, on_signal);
}

StopSignals::~StopSignals() {
  handle(SIGINT, SIG_DFL);
  handle(SIGTERM, SIG_DFL);
  ends = true;
  wake_watcher();
  watcher_.join();
  close(wake_fd);
}

int StopSignals::asked() {
  last_sign_of_life = now();
  return first_signal;
}

void StopSignals::expect_within(double seconds) {
  using Seconds = std::chrono::duration<double>;
  const auto longer = std::max<Seconds>(kPatience, Seconds(seconds));
  patience = std::chrono::duration_cast<Clock::duration>(longer).count();
  last_sign_of_life = now();
}

void StopSignals::watch() {
  uint64_t count = 0;
  while (read(wake_fd, &count, sizeof(count)) < 0 && errno == EINTR) {
  }
  for (; !ends; std::this_thread::sleep_for(kPoll)) {
    const auto silence = now() - std::max(signal_came.load(), last_sign_of_life.load());
    if (silence >= patience) {
      const int signal = first_signal;
      std::cerr << (signal == SIGINT ? "\nfsdp: SIGINT" : "fsdp: SIGTERM")
                << (patience == 0
                        ? " came before the first step"
                        : ", but the run does not get to the end of its step: it waits for other "
                          "ranks; --resume goes on from its newest checkpoint")
                << std::endl;
      handle(signal, SIG_DFL);
      kill(getpid(), signal);
    }
  }
}

} // namespace fsdp::cli
