// libFuzzer target of what reads the headers and manifests of checkpoints, for
// clang: tests/CMakeLists.txt builds it with -DFSDP_BUILD_FUZZERS=ON. The suite
// runs a bounded number of mutations of its own (tests/checkpoint/storage_test.cpp).

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <fsdp/error.h>

#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) {
    return 0;
  }
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    if (data[0] % 2 == 0) {
      fsdp::detail::parse_safetensors(text, static_cast<int64_t>(text.size()), "fuzz");
    } else {
      fsdp::detail::check_coverage(fsdp::detail::parse_manifest(text, "fuzz"));
    }
  } catch (const fsdp::CheckpointError&) {
  }
  return 0;
}
