// A library that tests load before `fsdp train` (LD_PRELOAD), to change what the system does:
//   FSDP_TEST_SYNC_MS=N     each fsync takes N milliseconds longer, as on a slow disk
//   FSDP_TEST_CLOCK_JUMPS=1 the time of day jumps by hours, there and back, three times a second
#include <dlfcn.h>
#include <time.h>

#include <cstdlib>

namespace {

/// The system's function of this name, which the one below hides.
template <class Function>
Function* system_function(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

/// The seconds by which the time of day is wrong at this moment.
time_t clock_error() {
  static const bool jumps = std::getenv("FSDP_TEST_CLOCK_JUMPS") != nullptr;
  static auto* const original = system_function<decltype(clock_gettime)>("clock_gettime");
  if (!jumps) {
    return 0;
  }
  timespec since_boot{};
  original(CLOCK_MONOTONIC, &since_boot);
  constexpr time_t kHour = 3600;
  constexpr time_t kErrors[] = {0, 5 * kHour, -7 * kHour, kHour};
  return kErrors[(since_boot.tv_sec * 3 + since_boot.tv_nsec / 333'333'334) % 4];
}

} // namespace

extern "C" int fsync(int fd) {
  static const long delay_ms = [] {
    const char* text = std::getenv("FSDP_TEST_SYNC_MS");
    return text ? std::atol(text) : 0;
  }();
  static auto* const original = system_function<decltype(fsync)>("fsync");
  const timespec delay{.tv_sec = delay_ms / 1000, .tv_nsec = delay_ms % 1000 * 1'000'000};
  nanosleep(&delay, nullptr);
  return original(fd);
}

extern "C" int clock_gettime(clockid_t clock, timespec* now) noexcept {
  static auto* const original = system_function<decltype(clock_gettime)>("clock_gettime");
  const int result = original(clock, now);
  if (result == 0 && clock == CLOCK_REALTIME) {
    now->tv_sec += clock_error();
  }
  return result;
}

extern "C" time_t time(time_t* now) noexcept {
  timespec precise{};
  clock_gettime(CLOCK_REALTIME, &precise);
  if (now) {
    *now = precise.tv_sec;
  }
  return precise.tv_sec;
}
