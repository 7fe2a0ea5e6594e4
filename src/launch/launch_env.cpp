#include "launch/launch_env.h"

#include <fsdp/launch.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/check.h"
#include "base/hash.h"
#include "base/text.h"
#include "launch/socket.h"

namespace fsdp::detail {

namespace {

// torch's default port, and above it the range of the ports that derived_port returns.
constexpr int kDefaultPort = 29500;
constexpr int kFirstDerivedPort = 29501;
constexpr int kNumDerivedPorts = 3000; // the range ends below the kernel's ephemeral ports

class Reader {
 public:
  explicit Reader(const GetEnv& get) : get_(get) {}

  bool has(const std::string& name) const {
    return get_(name).has_value();
  }
  std::string text(const std::string& name, const std::string& otherwise = "") const {
    return get_(name).value_or(otherwise);
  }
  int number(const std::string& name) const {
    const auto value = get_(name);
    FSDP_CHECK_AS(
        ConfigError, value, "environment variable ", name, " is missing; it comes with ", because_);
    const auto number = parse_int(*value, "environment variable " + name);
    FSDP_CHECK_AS(
        ConfigError, std::in_range<int>(number), "environment variable ", name, " is '", *value,
        "', which is out of range");
    return static_cast<int>(number);
  }
  int number(const std::string& name, int otherwise) const {
    return has(name) ? number(name) : otherwise;
  }
  int port(const std::string& name, int otherwise) const {
    const int value = number(name, otherwise);
    FSDP_CHECK_AS(
        ConfigError, !has(name) || (value >= 1 && value <= 65535), "environment variable ", name,
        " is '", text(name), "', which is no port; use a free one from 1024 to 65535, the same on ",
        "every rank");
    return value;
  }
  /// Names the variable that made us expect the others, for messages about missing ones.
  void expect_because(const std::string& name) {
    because_ = name;
  }

 private:
  const GetEnv& get_;
  std::string because_;
};

// Returns the same port for all ranks of a job, and most likely another port for another job on the
// same host.
int derived_port(const std::string& job) {
  return kFirstDerivedPort + static_cast<int>(add_to_hash(kEmptyHash, job) % kNumDerivedPorts);
}

/// Reads the variables of these names. `because` is the one that tells of the launcher.
LaunchEnv read_ranks(
    Reader& env,
    const char* launcher,
    const char* because,
    const char* rank,
    const char* world_size,
    const char* local_rank,
    const char* local_world_size) {
  env.expect_because(because);
  LaunchEnv launch{.launcher = launcher};
  launch.rank = env.number(rank);
  launch.world_size = env.number(world_size);
  launch.local_rank = env.number(local_rank, 0);
  launch.local_world_size = env.number(local_world_size, 0);
  return launch;
}

LaunchEnv read_torchrun(Reader& env) {
  auto launch = read_ranks(
      env, "torchrun or fsdp run", env.has("RANK") ? "RANK" : "WORLD_SIZE", "RANK", "WORLD_SIZE",
      "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  launch.agent_store = env.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  launch.attempt = env.number("TORCHELASTIC_RESTART_COUNT", 0);
  return launch;
}

LaunchEnv read_slurm(Reader& env) {
  env.expect_because("SLURM_STEP_ID");
  LaunchEnv launch{.launcher = "Slurm"};
  launch.rank = env.number("SLURM_PROCID");
  launch.world_size = env.has("SLURM_STEP_NUM_TASKS") ? env.number("SLURM_STEP_NUM_TASKS")
                                                      : env.number("SLURM_NTASKS");
  launch.local_rank = env.number("SLURM_LOCALID", 0);
  const int nodes = env.number("SLURM_STEP_NUM_NODES", env.number("SLURM_NNODES", 0));
  if (nodes > 0) { // Slurm does not say how it has divided them over several
    launch.local_world_size = (launch.world_size + nodes - 1) / nodes;
  }
  if (nodes != 1) {
    launch.master_addr =
        first_slurm_host(env.text("SLURM_STEP_NODELIST", env.text("SLURM_JOB_NODELIST")));
  }
  launch.master_port = derived_port(env.text("SLURM_JOB_ID") + "." + env.text("SLURM_STEP_ID"));
  return launch;
}

LaunchEnv read_open_mpi(Reader& env) {
  auto launch = read_ranks(
      env, "Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
      "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
  const auto job = env.text("PMIX_NAMESPACE", env.text("OMPI_MCA_ess_base_jobid"));
  if (!job.empty()) {
    launch.master_port = derived_port(job);
  }
  return launch;
}

LaunchEnv read_pmi(Reader& env) {
  return read_ranks(
      env, "a PMI launcher", "PMI_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
      "MPI_LOCALNRANKS");
}

using ReadLauncher = LaunchEnv (*)(Reader& env);

/// Returns the reader for the launcher that started this process, or null.
ReadLauncher find_launcher(const Reader& env) {
  if (env.has("RANK") || env.has("WORLD_SIZE")) {
    return read_torchrun;
  }
  // SLURM_PROCID alone is not enough: a batch script has it too, and a process
  // that it starts without srun is a world of its own.
  if (env.has("SLURM_STEP_ID") && env.has("SLURM_PROCID")) {
    return read_slurm;
  }
  if (env.has("OMPI_COMM_WORLD_SIZE")) {
    return read_open_mpi;
  }
  if (env.has("PMI_SIZE")) {
    return read_pmi;
  }
  return nullptr;
}

/// The message begins with `who`.
void check_ranks(const LaunchEnv& launch, const std::string& who) {
  FSDP_CHECK_AS(
      ConfigError, launch.world_size >= 1 && launch.rank >= 0 && launch.rank < launch.world_size,
      who, ": rank ", launch.rank, " of ", launch.world_size,
      ": ranks count from 0 and end below the world size");
}

} // namespace

bool LaunchEnv::one_machine() const {
  return world_size == 1 || local_world_size == world_size || is_loopback(master_addr);
}

std::optional<std::string> process_env(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value && *value ? std::optional<std::string>(value) : std::nullopt;
}

LaunchEnv read_launch_env(const GetEnv& get) {
  Reader env(get);
  const auto read = find_launcher(env);
  auto launch = read ? read(env) : LaunchEnv();
  launch.master_addr = env.text("MASTER_ADDR", launch.master_addr);
  launch.master_port = env.port("MASTER_PORT", launch.master_port);
  check_ranks(launch, launch.launcher);
  return launch;
}

void override_ranks(LaunchEnv& launch, const InitOptions& options, const std::string& backend) {
  if (options.rank >= 0) {
    launch.rank = options.rank;
  }
  if (options.world_size >= 0) {
    launch.world_size = options.world_size;
  }
  check_ranks(launch, "backend " + backend);
}

void require_master(LaunchEnv& launch) {
  if (launch.master_addr.empty() && launch.local_world_size == launch.world_size) {
    launch.master_addr = "127.0.0.1";
  }
  FSDP_CHECK_AS(
      ConfigError, !launch.master_addr.empty(), launch.launcher, ": ", launch.world_size,
      " ranks, but the host of rank 0 is not known; set MASTER_ADDR to its host on every rank");
  FSDP_CHECK_AS(
      ConfigError,
      launch.local_world_size == 0 || launch.local_world_size >= launch.world_size ||
          !is_loopback(launch.master_addr),
      "MASTER_ADDR=", launch.master_addr, " is a loopback address, but only ",
      launch.local_world_size, " of the ", launch.world_size,
      " ranks run on this machine; set it to an address that the other machines reach");
  if (launch.master_port == 0) {
    launch.master_port = kDefaultPort;
  }
}

std::string first_slurm_host(const std::string& node_list) {
  const auto end = node_list.find_first_of(",[");
  if (end == std::string::npos || node_list[end] == ',') {
    return node_list.substr(0, end);
  }
  const auto prefix = node_list.substr(0, end);
  const auto number_end = node_list.find_first_of(",-]", end + 1);
  FSDP_CHECK_AS(
      ConfigError, number_end != std::string::npos, "SLURM_JOB_NODELIST is '", node_list,
      "', whose first host cannot be read; set MASTER_ADDR");
  const auto suffix_start = node_list.find(']', end);
  const auto suffix_end = node_list.find(',', suffix_start);
  return prefix + node_list.substr(end + 1, number_end - end - 1) +
         node_list.substr(suffix_start + 1, suffix_end - suffix_start - 1);
}

} // namespace fsdp::detail

bool fsdp::is_launched() {
  const detail::GetEnv get = detail::process_env;
  return detail::find_launcher(detail::Reader(get)) != nullptr;
}

int fsdp::num_restarts() {
  const detail::GetEnv get = detail::process_env;
  const detail::Reader env(get);
  return std::max(
      env.number("TORCHELASTIC_RESTART_COUNT", 0), env.number("SLURM_RESTART_COUNT", 0));
}

fsdp::LocalRank fsdp::local_rank() {
  const auto launch = detail::read_launch_env(detail::process_env);
  return {launch.local_rank, std::max(1, launch.local_world_size)};
}
