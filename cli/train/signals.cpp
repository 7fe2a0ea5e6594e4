#include "cli/train/signals.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>

namespace fsdp::cli {

namespace {

std::atomic<int> first_signal{0};
static_assert(std::atomic<int>::is_always_lock_free); // required in a signal handler

void on_signal(int signal) {
  int none = 0;
  if (!first_signal.compare_exchange_strong(none, signal)) {
    _exit(128 + signal);
  }
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
  handle(SIGINT, on_signal);
  handle(SIGTERM, on_signal);
}

StopSignals::~StopSignals() {
  handle(SIGINT, SIG_DFL);
  handle(SIGTERM, SIG_DFL);
}

int StopSignals::asked() {
  return first_signal;
}

} // namespace fsdp::cli
