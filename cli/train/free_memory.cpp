#include "cli/train/free_memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace fsdp::cli {

namespace {

namespace fs = std::filesystem;

constexpr auto kNoLimit = std::numeric_limits<int64_t>::max();

void lower(FreeMemory& free, int64_t bytes, const std::string& limit) {
  if (bytes < free.bytes) {
    free = {std::max<int64_t>(0, bytes), limit};
  }
}

/// The number behind `name` in a file of lines such as "MemAvailable: 23 kB". With an empty name,
/// the number that the file begins with. Empty if there is none, as in "max".
std::optional<int64_t> number_in(const fs::path& path, const std::string& name = "") {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    if (!name.empty() && (!(words >> word) || word != name)) {
      continue;
    }
    int64_t number = 0;
    return words >> number ? std::optional(number) : std::nullopt;
  }
  return std::nullopt;
}

/// The names of a control group's files.
struct GroupFiles {
  const char* most;
  const char* used;
  const char* cache; // in memory.stat
};
constexpr GroupFiles kVersion1{
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr GroupFiles kVersion2{"memory.max", "memory.current", "inactive_file"};

/// Looks at the group and all groups above it, up to the folder `top`.
void lower_by_groups(
    FreeMemory& free, const fs::path& top, const std::string& group, const GroupFiles& files) {
  for (auto name = fs::path(group).relative_path();; name = name.parent_path()) {
    const auto folder = top / name;
    const auto most = number_in(folder / files.most);
    const auto used = number_in(folder / files.used);
    if (most && used) {
      const auto cache = number_in(folder / "memory.stat", files.cache).value_or(0);
      lower(free, *most - *used + cache, "below the memory limit of the control group");
    }
    if (name.empty()) {
      return;
    }
  }
}

} // namespace

FreeMemory free_host_memory(const fs::path& root) {
  FreeMemory free{kNoLimit, "in memory"};
  if (const auto kib = number_in(root / "proc/meminfo", "MemAvailable:")) {
    lower(free, *kib * 1024, "in this machine's memory");
  }
  // Lines are "number:controllers:path"; version 2 has no controllers.
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = std::min(line.find(':'), line.size());
    const auto second = std::min(line.find(':', first + 1), line.size());
    const auto controllers = "," + line.substr(first, second - first).erase(0, 1) + ",";
    const auto path = line.substr(std::min(second + 1, line.size()));
    if (controllers == ",,") {
      lower_by_groups(free, root / "sys/fs/cgroup", path, kVersion2);
    } else if (controllers.find(",memory,") != std::string::npos) {
      lower_by_groups(free, root / "sys/fs/cgroup/memory", path, kVersion1);
    }
  }
  rlimit limit{};
  const auto pages = number_in(root / "proc/self/statm");
  if (pages && getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    lower(
        free, static_cast<int64_t>(limit.rlim_cur) - *pages * sysconf(_SC_PAGESIZE),
        "below the limit of ulimit -v");
  }
  return free;
}

FreeMemory free_device_memory(c10::Device device) {
  FreeMemory free{kNoLimit, "on " + device.str()};
  auto* allocator = c10::getDeviceAllocator(device.type());
  // torch has this function since 2.12.
  const auto ask = [&](auto* any) {
    if constexpr (requires { any->getMemoryInfo(device.index()); }) {
      free.bytes = static_cast<int64_t>(any->getMemoryInfo(device.index()).first);
    }
  };
  try {
    ask(allocator);
  } catch (const c10::Error&) { // this allocator does not have it
  }
  return free;
}

} // namespace fsdp::cli
