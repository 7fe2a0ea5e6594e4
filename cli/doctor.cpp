// `fsdp doctor`: checks whether this machine has what the tool needs.
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/sysinfo.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <chrono>
#include <string>
#include <thread>

#include <fsdp/distributed.h>
#include <fsdp/launch.h>

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
    screen_.labelled(what, "ok       " + text);
  }
  /// Something is missing that only some features need.
  void missing(const std::string& what, const std::string& text) {
    screen_.labelled(what, "missing  " + text);
  }
  /// `good` or `missing`.
  void check(
      bool there, const std::string& what, const std::string& text, const std::string& without) {
    there ? good(what, text) : missing(what, without);
  }
  /// Something is broken that everything needs.
  void bad(const std::string& what, const std::string& text) {
    screen_.labelled(what, "BROKEN   " + text);
    broken_ = true;
  }
  int exit_code() const {
    return broken_ ? kFailed : 0;
  }

 private:
  Screen screen_;
  bool broken_ = false;
};

void look_at_tools(Findings& findings) {
  findings.good("built", std::string("by ") + __VERSION__);
  for (const auto* name : {"g++", "cmake", "ninja", "git"}) {
    const auto path = find_in_path(name);
    findings.check(!path.empty(), name, path, "not in PATH; only needed to build");
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
  findings.check(
      torch::cuda::is_available(), "cuda",
      c10::str(static_cast<int>(torch::cuda::device_count()), " devices"),
      "torch finds no CUDA device; training runs on the CPU");
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

/// Which NCCL is loaded, and whether ranks can share a GPU over it.
std::string nccl_text() {
  const auto version = nccl_version();
  if (version == 0) {
    return "";
  }
  return c10::str(
      ", NCCL ", version / 10000, ".", version / 100 % 100, ".", version % 100,
      nccl_shares_gpus() ? ", several of them may share a GPU"
                         : ", one per GPU (NCCL 2.30 or later lets several share one: "
                           "NCCL_MULTI_RANK_GPU_ENABLE=1)");
}

/// Runs an all-reduce in a world of one process, over the backend's own transport. `without` says
/// what does not work if that fails.
void try_backend(Findings& findings, const char* name, const char* without) {
  try {
    init_process_group(
        {.backend = name, .rank = 0, .world_size = 1, .timeout = std::chrono::seconds(20)});
    const auto device = std::string(name) == "nccl" ? torch::kCUDA : torch::kCPU;
    const auto one = torch::ones({1}, device);
    default_group().all_reduce(one);
    destroy_process_group();
    findings.good(name, "ranks as processes" + (device == torch::kCUDA ? nccl_text() : ""));
  } catch (const c10::Error& error) {
    findings.missing(name, c10::str(error.what_without_backtrace(), "; ", without));
    if (is_initialized()) {
      destroy_process_group();
    }
  }
}

/// Serves a store at a free port, as `fsdp run` does for its ranks.
void try_port(Findings& findings) {
  try {
    const LaunchJob job({});
    findings.good(
        "ports", "127.0.0.1 has free ports, for example " + job.environment(0).at("MASTER_PORT"));
  } catch (const c10::Error&) {
    findings.missing(
        "ports", "127.0.0.1 has no free port; fsdp run cannot start ranks as processes");
  }
}

int64_t free_bytes(const char* path) {
  struct statvfs info{};
  return statvfs(path, &info) == 0 ? static_cast<int64_t>(info.f_bavail * info.f_frsize) : 0;
}

void look_at_system(Findings& findings) {
  const auto shared = free_bytes("/dev/shm");
  findings.check(
      shared >= kLittleSharedMemory, "shm", binary_size(shared) + " free in /dev/shm",
      c10::str(
          "/dev/shm has ", binary_size(shared),
          " free; NCCL between processes may need more (docker: --shm-size 1g)"));
  const auto disk = free_bytes(".");
  findings.check(
      disk >= kLittleDisk, "disk", binary_size(disk) + " free here",
      binary_size(disk) + " free here; checkpoints need space");
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  findings.check(
      limit.rlim_cur >= kFewFiles, "files", c10::str(limit.rlim_cur, " files can be open at once"),
      c10::str("only ", limit.rlim_cur, " files can be open at once; try ulimit -n 4096"));
}

void look_at_text(Findings& findings) {
  try {
    const auto corpus = Corpus::libtorch_headers();
    findings.good("text", c10::str(corpus.name(), ", ", decimal_count(corpus.num_train(), "B")));
  } catch (const c10::Error& error) {
    findings.missing("text", error.what_without_backtrace());
  }
}

int doctor() {
  Findings findings;
  look_at_tools(findings);
  look_at_torch(findings);
  try_threads(findings);
  try_backend(findings, "gloo", "fsdp run does not work on the CPU");
  if (torch::cuda::is_available()) {
    try_backend(findings, "nccl", "ranks as threads can still use the GPUs");
  } else {
    findings.missing("nccl", "needs a GPU");
  }
  try_port(findings);
  look_at_system(findings);
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
