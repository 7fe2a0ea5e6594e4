#pragma once

#include <c10/util/Exception.h>

#include <cstdio>

namespace bench {

/// The main function of a benchmark. If `run` throws a c10::Error, prints its message
/// in a line and returns 2.
inline int bench_main(const char* name, int (*run)(int, char**), int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const c10::Error& error) {
    fprintf(stderr, "%s: %s\n", name, error.what_without_backtrace());
    return 2;
  }
}

} // namespace bench
