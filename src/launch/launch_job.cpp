#include <fsdp/launch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string_view>
#include <thread>
#include <vector>

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
/// How long node 0 waits until the other nodes offer their ranks for a restart. It is longer than a
/// launcher takes to end its ranks.
constexpr auto kOfferWithin = seconds(6);

// Keys of the store. Those of a restart come with its number.
constexpr const char* kFailed = "failed/";
constexpr const char* kOffer = "offer/"; // how many ranks of a node are left
constexpr const char* kPlan = "plan/";   // the number of ranks of each node, or why it must end
constexpr const char* kAttempt = "attempt";
constexpr const char* kLeft = "left/";
constexpr const char* kAlive = "alive"; // a counter; nodes other than 0 increment it while they run
constexpr const char* kShape = "shape";
constexpr const char* kEnd = "end: ";

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
  int attempt = 0;
  std::vector<int> ranks_of_node;

  std::string key(const char* name) const {
    return name + std::to_string(attempt);
  }
  std::string offer_key(int node) const {
    return key(kOffer) + "/" + std::to_string(node);
  }
  int ranks_before(int node) const {
    return std::accumulate(ranks_of_node.begin(), ranks_of_node.begin() + node, 0);
  }

  void wait_a_moment() const {
    std::this_thread::sleep_for(milliseconds(20));
    FSDP_CHECK_AS(
        CommError, !options.stop || !options.stop(), "stopped while the nodes agree on a restart");
  }

  /// On node 0: waits for the offers of all nodes and decides about the next attempt.
  std::string make_plan();
  /// Waits until node 0 has decided. Throws if node 0 is gone.
  std::string wait_for_plan();
};

std::string LaunchJob::State::make_plan() {
  const auto deadline = Clock::now() + kOfferWithin;
  std::vector<int> nodes; // those that are there
  while (static_cast<int>(nodes.size()) < options.num_nodes && Clock::now() < deadline) {
    nodes.clear();
    for (int node = 0; node < options.num_nodes; ++node) {
      if (store->check({offer_key(node)})) {
        nodes.push_back(node);
      }
    }
    wait_a_moment();
  }
  std::vector<int> counts(options.num_nodes, 0);
  for (const int node : nodes) {
    counts[node] = static_cast<int>(
        detail::parse_int(store->get_to_str(offer_key(node)), "a number of ranks"));
  }
  const int all = options.num_nodes * options.num_ranks;
  const int least = options.min_ranks > 0 ? options.min_ranks : all;
  int total = std::accumulate(counts.begin(), counts.end(), 0);
  // A rank that died is only left out if enough others are there.
  for (const int node : nodes) {
    const int more = std::clamp(least - total, 0, options.num_ranks - counts[node]);
    counts[node] += more;
    total += more;
  }
  if (total < least) {
    return c10::str(
        kEnd, total, " of ", all, " ranks are left, and ", least, " are needed",
        options.min_ranks > 0 ? "" : "; --min-ranks allows fewer");
  }
  return detail::join(counts, " ");
}

std::string LaunchJob::State::wait_for_plan() {
  const auto key = this->key(kPlan);
  const auto deadline = Clock::now() + kOfferWithin + kOfferWithin;
  while (!store->check({key})) {
    FSDP_CHECK_AS(CommError, Clock::now() < deadline, "node 0 does not decide about a restart");
    wait_a_moment();
  }
  return store->get_to_str(key);
}

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
  state_->ranks_of_node.assign(options.num_nodes, options.num_ranks);
  if (options.node_rank != 0 && state_->store->check({kAttempt})) {
    rejoin();
  }
}

void LaunchJob::rejoin() {
  // This node was lost, or is late: the others have started again without it.
  const auto& options = state_->options;
  state_->attempt = static_cast<int>(
      detail::parse_int(state_->store->get_to_str(kAttempt), "the number of restarts"));
  FSDP_CHECK_AS(
      CommError, state_->attempt < options.max_restarts, "node ", options.node_rank,
      " is late: the others go on without it, and may not start again");
  report({c10::str("node ", options.node_rank, " is back"), 1});
  const auto why = restart(options.num_ranks);
  FSDP_CHECK_AS(CommError, why.empty(), "node ", options.node_rank, " is late: ", why);
}

LaunchJob::~LaunchJob() = default;

std::map<std::string, std::string> LaunchJob::environment(int local_rank) const {
  const auto& options = state_->options;
  const auto& master = state_->master;
  const int num_local = num_ranks();
  std::map<std::string, std::string> variables{
      {"RANK", std::to_string(first_rank() + local_rank)},
      {"WORLD_SIZE", std::to_string(world_size())},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(num_local)},
      {"GROUP_RANK", std::to_string(options.node_rank)},
      {"MASTER_ADDR", master.host},
      {"MASTER_PORT", std::to_string(master.port)},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(attempt())},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(options.max_restarts)}};
  if (!detail::process_env("OMP_NUM_THREADS")) {
    const auto cores = static_cast<int>(std::thread::hardware_concurrency());
    variables["OMP_NUM_THREADS"] = std::to_string(std::max(1, cores / std::max(1, num_local)));
  }
  return variables;
}

void LaunchJob::report(const Failure& failure) {
  try {
    state_->store->set(
        state_->key(kFailed), std::to_string(failure.exit_code) + " " + failure.what);
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
    if (!state_->store->check({state_->key(kFailed)})) {
      return std::nullopt;
    }
    const auto text = state_->store->get_to_str(state_->key(kFailed));
    const auto space = text.find(' ');
    const auto code = detail::parse_int(text.substr(0, space), "an exit code");
    return Failure{text.substr(space + 1), static_cast<int>(code)};
  } catch (const std::exception&) {
    return Failure{"the launcher on node 0 is gone", 1};
  }
}

std::string LaunchJob::restart(int ranks_left) {
  auto& state = *state_;
  if (state.attempt == state.options.max_restarts) {
    return c10::str("no restart is left of ", state.attempt);
  }
  try {
    ++state.attempt;
    state.store->set(state.offer_key(state.options.node_rank), std::to_string(ranks_left));
    if (state.options.node_rank == 0) {
      state.store->set(kAttempt, std::to_string(state.attempt));
      state.store->set(state.key(kPlan), state.make_plan());
    }
    const auto plan = state.wait_for_plan();
    if (plan.starts_with(kEnd)) {
      return plan.substr(std::string_view(kEnd).size());
    }
    const auto counts = detail::split(plan, ' ');
    for (size_t node = 0; node < counts.size(); ++node) {
      state.ranks_of_node[node] =
          static_cast<int>(detail::parse_int(counts[node], "a number of ranks"));
    }
    return "";
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    return "the launcher on node 0 is gone";
  }
}

int LaunchJob::num_ranks() const {
  return state_->ranks_of_node[state_->options.node_rank];
}

int LaunchJob::world_size() const {
  return state_->ranks_before(state_->options.num_nodes);
}

int LaunchJob::first_rank() const {
  return state_->ranks_before(state_->options.node_rank);
}

int LaunchJob::attempt() const {
  return state_->attempt;
}

void LaunchJob::leave(bool failed, const std::function<bool()>& stop) {
  const auto& options = state_->options;
  if (options.num_nodes == 1 || (num_ranks() == 0 && options.node_rank != 0)) {
    return;
  }
  auto& store = *state_->store;
  const auto left_key = state_->key(kLeft);
  try {
    store.add(left_key, 1);
  } catch (const std::exception&) {
    return; // node 0 is gone, and only node 0 waits for the others
  }
  if (options.node_rank != 0) {
    return;
  }
  const auto& counts = state_->ranks_of_node;
  const auto nodes =
      1 + std::count_if(counts.begin() + 1, counts.end(), [](int n) { return n > 0; });
  auto deadline = Clock::now() + (failed ? kLeaveAfterFailure : kSilence);
  int64_t last_signs = 0;
  while (true) {
    const auto left = store.add(left_key, 0);
    if (left >= nodes || stop()) {
      return;
    }
    if (const auto signs = left + store.add(kAlive, 0); signs != last_signs && !failed) {
      last_signs = signs;
      deadline = Clock::now() + kSilence;
    }
    if (Clock::now() > deadline) {
      FSDP_CHECK_AS(
          CommError, failed, "the ranks of node 0 are done, but the launchers of ", nodes - left,
          " of the other nodes have given no sign of life for ", kSilence.count(),
          " s: they or their machines are gone");
      return;
    }
    std::this_thread::sleep_for(milliseconds(100));
  }
}

} // namespace fsdp
