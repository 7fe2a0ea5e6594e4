#pragma once

#include <c10/util/Exception.h>

#include <cstdio>

namespace bench {

/// The main of a benchmark: what `run` throws is said in a line, with exit code 2.
inline int bench_main(const char* name, int (*run)(int, char**), int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const c10::Error& error) {
    fprintf(stderr, "%s: %s\n", name, error.what_without_backtrace());
    return 2;
  }
}

} // namespace bench
