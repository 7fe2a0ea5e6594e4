#include "cli/train/free_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "cli/files.h"
#include "support/processes.h"

namespace fsdp::cli {
namespace {

/// A folder with proc and sys of a machine that has 8 MiB available.
std::string small_machine(const std::string& groups) {
  const auto root = test::temporary_folder();
  const auto write = [&](const std::string& path, const std::string& text) {
    make_folders(std::filesystem::path(root + path).parent_path());
    write_file(root + path, text);
  };
  write("/proc/meminfo", "MemTotal:       16384 kB\nMemFree: 1 kB\nMemAvailable:    8192 kB\n");
  write("/proc/self/cgroup", groups);
  write("/sys/fs/cgroup/job/memory.max", "6000000\n");
  write("/sys/fs/cgroup/job/memory.current", "4000000\n");
  write("/sys/fs/cgroup/job/memory.stat", "anon 3000000\ninactive_file 1000000\n");
  write("/sys/fs/cgroup/job/step/memory.max", "max\n");
  write("/sys/fs/cgroup/job/step/memory.current", "1000\n");
  write("/sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "5000000\n");
  write("/sys/fs/cgroup/memory/docker/memory.usage_in_bytes", "3000000\n");
  write("/sys/fs/cgroup/memory/docker/memory.stat", "total_inactive_file 500000\n");
  return root;
}

TEST(FreeMemory, IsTheLeastOfMachineAndControlGroups) {
  const auto free = [](const std::string& groups) {
    return free_host_memory(small_machine(groups));
  };
  EXPECT_EQ(free("0::/\n").bytes, 8192 << 10);
  EXPECT_EQ(free("0::/\n").limit, "in this machine's memory");
  EXPECT_EQ(free("0::/job/step\n").bytes, 3000000); // the limit of a group above
  EXPECT_NE(free("0::/job/step\n").limit.find("control group"), std::string::npos);
  EXPECT_EQ(free("5:cpu,cpuacct:/x\n4:memory:/docker\n0::/\n").bytes, 2500000);
  EXPECT_EQ(free("").bytes, 8192 << 10);
}

} // namespace
} // namespace fsdp::cli
