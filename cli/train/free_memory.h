#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include <c10/core/Device.h>

namespace fsdp::cli {

/// How much memory a process can still take, and what limits it.
struct FreeMemory {
  int64_t bytes = 0;
  std::string limit; // for messages: "in this machine's memory"
};

/// The least of what the machine has available, what the control groups of this process (v1 and v2)
/// leave, and what `ulimit -v` leaves. Page cache that the kernel would give up counts as free.
/// `root` is the folder that has proc and sys.
FreeMemory free_host_memory(const std::filesystem::path& root = "/");

/// What is free on an accelerator. Without bounds if this torch cannot tell.
FreeMemory free_device_memory(c10::Device device);

} // namespace fsdp::cli
