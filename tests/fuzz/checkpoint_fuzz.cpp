// libFuzzer target of what reads checkpoints, for clang: tests/CMakeLists.txt builds it with
// -DFSDP_BUILD_FUZZERS=ON. The first byte of an input is its kind. An empty folder that is given
// gets the corpus first. The suite reads that too, with a bounded number of mutations of its own
// (tests/checkpoint/fuzz_test.cpp).

#include <stdlib.h>

#include <cstddef>
#include <cstdint>

#include "fuzz/checkpoint_inputs.h"

using namespace fsdp::test;

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  for (int i = 1; i < *argc; ++i) {
    const fsdp::detail::Path folder = (*argv)[i];
    if (!fsdp::detail::is_folder(folder) || !fsdp::detail::list_folder(folder).empty()) {
      continue;
    }
    int number = 0;
    for (const auto& input : fuzz_corpus()) {
      fsdp::detail::write_text(
          folder / std::to_string(number++), static_cast<char>(input.kind) + input.bytes);
    }
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static char folder[] = "/dev/shm/checkpoint_fuzz_XXXXXX";
  static const FuzzReader reader(mkdtemp(folder));
  if (size > 0) {
    const auto kind = static_cast<FuzzKind>(data[0] % static_cast<int>(FuzzKind::count));
    (void)reader.read(kind, {reinterpret_cast<const char*>(data) + 1, size - 1});
  }
  return 0;
}
