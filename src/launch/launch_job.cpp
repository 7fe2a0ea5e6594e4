#include <fsdp/launch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <thread>

#include "base/check.h"
#include "base/text.h"
#include "launch/launch_env.h"
#include "launch/socket.h"
#include "launch/tcp_store.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr auto kConnectTimeout = seconds(60);
constexpr auto kPollInterval = milliseconds(500);
constexpr auto kLeaveAfterFailure = seconds(5);
constexpr auto kSilence = seconds(60);
constexpr const char* kFailed = "failed";
constexpr const char* kLeft = "left";
constexpr const char* kAlive = "alive"; // a counter; nodes other than 0 increment it while they run
constexpr const char* kShape = "shape";

/// Waits until the launcher of node 0 listens at `master`. c10d could wait too, but
/// `stop` could not interrupt that.
void wait_for_node_0(const detail::Endpoint& master, const std::function<bool()>& stop) {
  const auto listens = [&] {
    try {
      return detail::connect_to(master.host, master.port, milliseconds(500)).get() >= 0;
    } catch (const CommError&) {
      return false; // a host name may not resolve before its machine has started
    }
  };
  const auto deadline = Clock::now() + kConnectTimeout;
  while (!listens()) {
    FSDP_CHECK_AS(CommError, !stop || !stop(), "stopped while waiting for node 0");
    FSDP_CHECK_AS(
        CommError, Clock::now() < deadline, "no launcher answers at ", master.host, ":",
        master.port, " within ", kConnectTimeout.count(),
        " s: is the one of node 0 running, and is this its address?");
    std::this_thread::sleep_for(milliseconds(100));
  }
}

} // namespace

struct LaunchJob::State {
  LaunchOptions options;
  detail::Endpoint master;
  c10::intrusive_ptr<c10d::Store> store; // keys of the launchers, not of the ranks
  Clock::time_point next_poll = Clock::now();
};

LaunchJob::LaunchJob(const LaunchOptions& options) : state_(std::make_unique<State>()) {
  FSDP_CHECK_AS(
      ConfigError, options.node_rank >= 0 && options.node_rank < options.num_nodes, "node rank ",
      options.node_rank, " of ", options.num_nodes,
      " nodes: they count from 0 and end below the number of nodes");
  FSDP_CHECK_AS(
      ConfigError, options.num_nodes == 1 || !options.master.empty(), options.num_nodes,
      " nodes need --master HOST:PORT, an address of node 0 that all reach");
  state_->options = options;
  if (!options.master.empty()) {
    state_->master = detail::parse_endpoint(options.master, "--master");
  }
  const bool one_machine = options.num_nodes == 1;
  auto& master = state_->master;
  c10::intrusive_ptr<c10d::Store> store;
  if (options.node_rank == 0) {
    store = detail::serve_store(master, one_machine);
  } else {
    wait_for_node_0(master, options.stop);
    store = detail::connect_store(master, kConnectTimeout);
  }
  state_->store = c10::make_intrusive<c10d::PrefixStore>("fsdp_run", store);
  const auto shape = c10::str(options.num_nodes, " nodes of ", options.num_ranks, " ranks");
  const auto first = state_->store->compareSet(kShape, std::string(), shape);
  if (first != shape) {
    const auto what = c10::str(
        "node ", options.node_rank, " was started for ", shape, ", another one for ", first);
    report({what, 2});
    FSDP_THROW(ConfigError, what);
  }
}

LaunchJob::~LaunchJob() = default;

std::map<std::string, std::string> LaunchJob::environment(int local_rank) const {
  const auto& options = state_->options;
  const auto& master = state_->master;
  const int num_local = options.num_ranks;
  std::map<std::string, std::string> variables{
      {"RANK", std::to_string(options.node_rank * num_local + local_rank)},
      {"WORLD_SIZE", std::to_string(options.num_nodes * num_local)},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(num_local)},
      {"GROUP_RANK", std::to_string(options.node_rank)},
      {"MASTER_ADDR", master.host},
      {"MASTER_PORT", std::to_string(master.port)},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
  if (!detail::process_env("OMP_NUM_THREADS")) {
    const auto cores = static_cast<int>(std::thread::hardware_concurrency());
    variables["OMP_NUM_THREADS"] = std::to_string(std::max(1, cores / num_local));
  }
  return variables;
}

void LaunchJob::report(const Failure& failure) {
  try {
    state_->store->set(kFailed, std::to_string(failure.exit_code) + " " + failure.what);
  } catch (const std::exception&) {
    // Node 0 is gone with its store, and the other nodes notice that themselves.
  }
}

std::optional<LaunchJob::Failure> LaunchJob::failure_elsewhere() {
  if (state_->options.num_nodes == 1 || Clock::now() < state_->next_poll) {
    return std::nullopt;
  }
  state_->next_poll = Clock::now() + kPollInterval;
  try {
    if (state_->options.node_rank != 0) {
      state_->store->add(kAlive, 1);
    }
    if (!state_->store->check({kFailed})) {
      return std::nullopt;
    }
    const auto text = state_->store->get_to_str(kFailed);
    const auto space = text.find(' ');
    const auto code = detail::parse_int(text.substr(0, space), "an exit code");
    return Failure{text.substr(space + 1), static_cast<int>(code)};
  } catch (const std::exception&) {
    return Failure{"the launcher on node 0 is gone", 1};
  }
}

void LaunchJob::leave(bool failed, const std::function<bool()>& stop) {
  const auto& options = state_->options;
  if (options.num_nodes == 1) {
    return;
  }
  auto& store = *state_->store;
  try {
    store.add(kLeft, 1);
  } catch (const std::exception&) {
    return; // node 0 is gone, and only node 0 waits for the others
  }
  if (options.node_rank != 0) {
    return;
  }
  auto deadline = Clock::now() + (failed ? kLeaveAfterFailure : kSilence);
  int64_t last_signs = 0;
  while (true) {
    const auto left = store.add(kLeft, 0);
    if (left == options.num_nodes || stop()) {
      return;
    }
    if (const auto signs = left + store.add(kAlive, 0); signs != last_signs && !failed) {
      last_signs = signs;
      deadline = Clock::now() + kSilence;
    }
    if (Clock::now() > deadline) {
      FSDP_CHECK_AS(
          CommError, failed, "the ranks of node 0 are done, but the launchers of ",
          options.num_nodes - left, " of the other nodes have given no sign of life for ",
          kSilence.count(), " s: they or their machines are gone");
      return;
    }
    std::this_thread::sleep_for(milliseconds(100));
  }
}

} // namespace fsdp
