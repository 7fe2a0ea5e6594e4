// `fsdp doctor`: checks whether this machine has what the tool needs.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/sysinfo.h>
#include <torch/torch.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <sstream>
#include <string>
#include <thread>

#include <fsdp/distributed.h>
#include <fsdp/error.h>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/files.h"
#include "cli/train/corpus.h"
#include "cli/train/progress.h"

namespace fsdp::cli {

namespace {

constexpr int64_t kLittleSharedMemory = 64 << 20; // NCCL needs some for each pair of ranks
constexpr int64_t kLittleDisk = int64_t{1} << 30;
constexpr rlim_t kFewFiles = 1024;

/// Prints one line per check. The exit code is 0 unless something essential is broken.
class Findings {
 public:
  void good(const std::string& what, const std::string& text) {
    say(what, "ok       " + text);
  }
  /// Something is missing that only some features need.
  void missing(const std::string& what, const std::string& text) {
    say(what, "missing  " + text);
  }
  /// Something is broken that everything needs.
  void bad(const std::string& what, const std::string& text) {
    say(what, "BROKEN   " + text);
    broken_ = true;
  }
  int exit_code() const {
    return broken_ ? kFailed : 0;
  }

 private:
  void say(const std::string& what, const std::string& text) {
    screen_.labelled(what, text);
  }

  Screen screen_;
  bool broken_ = false;
};

void look_at_tools(Findings& findings) {
  findings.good("built", std::string("by ") + __VERSION__);
  for (const auto* name : {"g++", "cmake", "ninja", "git"}) {
    const auto path = find_in_path(name);
    if (path.empty()) {
      findings.missing(name, "not in PATH; only needed to build");
    } else {
      findings.good(name, path);
    }
  }
}

void look_at_torch(Findings& findings) {
  findings.good(
      "torch", c10::str(
                   TORCH_VERSION, ", ", std::thread::hardware_concurrency(), " cores, ",
                   torch::get_num_threads(), " threads per operator"));
  struct sysinfo info{};
  if (sysinfo(&info) == 0) {
    findings.good(
        "memory", c10::str(
                      binary_size(static_cast<int64_t>(info.freeram) * info.mem_unit), " free of ",
                      binary_size(static_cast<int64_t>(info.totalram) * info.mem_unit)));
  }
  if (torch::cuda::is_available()) {
    findings.good("cuda", c10::str(torch::cuda::device_count(), " devices"));
  } else {
    findings.missing("cuda", "torch finds no CUDA device; training runs on the CPU");
  }
}

/// Runs an all-reduce over two ranks that are threads.
void try_threads(Findings& findings) {
  try {
    run_ranks(2, [](int) {
      const auto one = torch::ones({1});
      default_group().all_reduce(one);
      TORCH_CHECK(
          one.item<double>() == 2, "the sum over two ranks is ", one.item<double>(), ", not 2");
    });
    findings.good("threads", "ranks as threads of one process");
  } catch (const c10::Error& error) {
    findings.bad("threads", error.what_without_backtrace());
  }
}

/// Runs an all-reduce in a world of one process, over the backend's own transport. `without` says
/// what does not work if that fails.
void try_backend(Findings& findings, const char* name, int port, const char* without) {
  try {
    init_process_group(
        {.backend = name,
         .init_method = "tcp://127.0.0.1:" + std::to_string(port),
         .rank = 0,
         .world_size = 1,
         .timeout = std::chrono::seconds(20)});
    const auto device = std::string(name) == "nccl" ? torch::kCUDA : torch::kCPU;
    const auto one = torch::ones({1}, device);
    default_group().all_reduce(one);
    destroy_process_group();
    findings.good(name, "ranks as processes");
  } catch (const c10::Error& error) {
    findings.missing(name, c10::str(error.what_without_backtrace(), "; ", without));
    if (is_initialized()) {
      destroy_process_group();
    }
  }
}

/// A free port of the loopback address, or 0.
int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  const bool bound = fd >= 0 && bind(fd, any, size) == 0 && getsockname(fd, any, &size) == 0;
  close(fd);
  return bound ? ntohs(address.sin_port) : 0;
}

int64_t free_bytes(const char* path) {
  struct statvfs info{};
  return statvfs(path, &info) == 0 ? static_cast<int64_t>(info.f_bavail * info.f_frsize) : -1;
}

void look_at_system(Findings& findings, int port) {
  if (port > 0) {
    findings.good("ports", c10::str("127.0.0.1 has free ports, for example ", port));
  } else {
    findings.missing(
        "ports", "127.0.0.1 has no free port; fsdp run cannot start ranks as processes");
  }
  const auto shared = free_bytes("/dev/shm");
  if (shared >= kLittleSharedMemory) {
    findings.good("shm", binary_size(shared) + " free in /dev/shm");
  } else {
    findings.missing(
        "shm", c10::str(
                   "/dev/shm has ", binary_size(std::max<int64_t>(0, shared)),
                   " free; NCCL between processes may need more (docker: --shm-size 1g)"));
  }
  const auto disk = free_bytes(".");
  if (disk >= kLittleDisk) {
    findings.good("disk", binary_size(disk) + " free here");
  } else {
    findings.missing(
        "disk", binary_size(std::max<int64_t>(0, disk)) + " free here; checkpoints need space");
  }
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur >= kFewFiles) {
    findings.good("files", c10::str(limit.rlim_cur, " files can be open at once"));
  } else {
    findings.missing(
        "files",
        c10::str("only ", limit.rlim_cur, " files can be open at once; try ulimit -n 4096"));
  }
}

void look_at_text(Findings& findings) {
  try {
    const auto corpus = Corpus::libtorch_headers();
    findings.good("text", c10::str(corpus.name(), ", ", decimal_count(corpus.train_bytes(), "B")));
  } catch (const c10::Error& error) {
    findings.missing("text", error.what_without_backtrace());
  }
}

int doctor() {
  Findings findings;
  look_at_tools(findings);
  look_at_torch(findings);
  const int port = free_port();
  try_threads(findings);
  if (port > 0) {
    try_backend(findings, "gloo", port, "fsdp run does not work on the CPU");
  }
  if (torch::cuda::is_available() && port > 0) {
    try_backend(findings, "nccl", free_port(), "ranks as threads can still use the GPUs");
  } else {
    findings.missing("nccl", "needs a GPU");
  }
  look_at_system(findings, port);
  look_at_text(findings);
  return findings.exit_code();
}

} // namespace

void add_doctor(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("doctor", "Check whether this machine has what the tool needs");
  command->callback([&action] { action = doctor; });
}

} // namespace fsdp::cli
