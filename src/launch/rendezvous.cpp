#include "launch/rendezvous.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <string_view>
#include <thread>

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/files.h"
#include "base/text.h"
#include "launch/socket.h"
#include "launch/tcp_store.h"

namespace fsdp::detail {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// How long the result of a rendezvous may take to reach every rank on a busy machine.
constexpr auto kResultTimeout = std::chrono::seconds(5);

c10::intrusive_ptr<c10d::Store> file_store(const std::string& url, int world_size) {
  const auto path = url.substr(std::string("file://").size());
  FSDP_CHECK_AS(
      ConfigError, !path.empty() && path.front() == '/', "init_method '", url,
      "' must be file:// and an absolute path");
  const auto folder = Path(path).parent_path();
  FSDP_CHECK_AS(
      ConfigError, is_folder(folder), "init_method '", url, "': there is no folder ",
      folder.string());
  return c10::make_intrusive<c10d::FileStore>(path, world_size);
}

/// Returns text that is equal for two ranks if and only if both have the same loopback interface:
/// the same boot of the same machine, and the same network namespace.
std::string machine_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot + link_target("/proc/self/ns/net");
}

/// An all-gather of strings through the store. Rank 0 collects the values, so that
/// the ranks read O(ranks) keys and not O(ranks^2). Rank 0 calls `check`, which
/// returns what is wrong with a rank's value, or "". At the first error the
/// exchange ends on all ranks: with ConfigError if the error begins with kConfig,
/// else with CommError.
class StoreAllGather {
 public:
  StoreAllGather(c10d::Store& store, int rank, int world_size, milliseconds timeout)
      : store_(store), rank_(rank), world_size_(world_size), deadline_(Clock::now() + timeout) {}

  using Check = std::function<std::string(int rank, const std::string& value)>;
  static constexpr std::string_view kConfig = "config: ";

  std::vector<std::string> operator()(
      const std::string& topic, const std::string& value, const Check& check) {
    if (rank_ == 0) {
      collect(topic, value, check);
    } else {
      store_.set(key(topic, rank_), value);
    }
    const auto result = topic + "/all";
    // Waits longer than rank 0, which reports at the deadline which ranks are missing.
    FSDP_CHECK_AS(
        CommError, appears_before(result, deadline_ + kResultTimeout), "rank ", rank_,
        " reached the store, but rank 0 did not answer in time: is it running?");
    auto values = split(store_.get_to_str(result), '\n');
    if (values.front() == "error") {
      store_.add(topic + "/told", 1);
      fail(values.back());
    }
    return values;
  }

 private:
  [[noreturn]] static void fail(const std::string& error) {
    if (error.starts_with(kConfig)) {
      FSDP_THROW(ConfigError, error.substr(kConfig.size()));
    }
    FSDP_THROW(CommError, error);
  }

  static std::string key(const std::string& topic, int rank) {
    return topic + "/" + std::to_string(rank);
  }

  bool appears_before(const std::string& key, Clock::time_point end) {
    while (Clock::now() < end) {
      if (store_.check({key})) {
        return true;
      }
      std::this_thread::sleep_for(milliseconds(10));
    }
    return false;
  }

  void collect(const std::string& topic, const std::string& value, const Check& check) {
    std::vector<std::string> values(world_size_);
    values[0] = value;
    std::vector<int> missing(world_size_ - 1);
    std::iota(missing.begin(), missing.end(), 1);
    int64_t num_arrived = 0;
    const auto arrived = [&](int rank) {
      if (!store_.check({key(topic, rank)})) {
        return false;
      }
      ++num_arrived;
      values[rank] = store_.get_to_str(key(topic, rank));
      const auto error = check(rank, values[rank]);
      if (!error.empty()) {
        end_for_all(topic, error, num_arrived);
      }
      return true;
    };
    for (;;) {
      std::erase_if(missing, arrived);
      if (missing.empty()) {
        break;
      }
      if (Clock::now() >= deadline_) {
        end_for_all(
            topic,
            c10::str(
                "rank ", join(missing), " of ", world_size_,
                " did not arrive in time; the others did"),
            num_arrived);
      }
      std::this_thread::sleep_for(milliseconds(5));
    }
    store_.set(topic + "/all", join(values, "\n"));
  }

  /// Gives the error to the ranks that have arrived and waits a while until they
  /// have read it, because the store may end with this process. Then throws it.
  [[noreturn]] void end_for_all(
      const std::string& topic, const std::string& error, int64_t num_arrived) {
    store_.set(topic + "/all", "error\n" + error);
    const auto patience = Clock::now() + kResultTimeout;
    while (store_.add(topic + "/told", 0) < num_arrived && Clock::now() < patience) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    fail(error);
  }

  c10d::Store& store_;
  const int rank_;
  const int world_size_;
  const Clock::time_point deadline_;
};

void claim_rank(c10d::Store& store, int rank, const std::string& init_method) {
  FSDP_CHECK_AS(
      CommError, store.add("claim/" + std::to_string(rank), 1) == 1, "rank ", rank,
      " is taken: two processes were started with it",
      init_method.starts_with("file://")
          ? ", or " + init_method + " is left over from an earlier run and must be removed"
          : "");
}

/// Returns the names and values as one line.
std::string to_line(const std::map<std::string, std::string>& values) {
  return nlohmann::json(values).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// Returns text that says which values of a rank are not those of rank 0. Empty if all are the
/// same.
std::string differences(
    const std::map<std::string, std::string>& mine, int rank, const std::string& line) {
  std::vector<std::string> found;
  const auto theirs = nlohmann::json::parse(line).get<std::map<std::string, std::string>>();
  auto all = theirs;
  all.insert(mine.begin(), mine.end());
  const auto value = [](const auto& values, const std::string& name) {
    const auto at = values.find(name);
    return at == values.end() ? std::string("nothing") : at->second;
  };
  for (const auto& [name, _] : all) {
    if (value(mine, name) != value(theirs, name)) {
      found.push_back(c10::str(
          name, " is ", value(mine, name), " on rank 0 and ", value(theirs, name), " on rank ",
          rank));
    }
  }
  return found.empty() ? "" : "the ranks were started differently: " + join(found, "; ");
}

/// Checks that all ranks have arrived and agree on world size and backend. Gives
/// `rendezvous` a store for this world only, this rank's address and the liveness check.
void verify_world(
    Rendezvous& rendezvous,
    const InitOptions& options,
    const std::string& backend,
    const LaunchEnv& launch,
    const std::string& master_host) {
  // Counts the worlds of this process, which may leave one and join another over
  // the same store.
  static std::atomic<int> generation{0};
  rendezvous.store = c10::make_intrusive<c10d::PrefixStore>(
      c10::str("fsdp/", launch.attempt, "/", generation++), rendezvous.store);
  rendezvous.store->setTimeout(options.timeout);
  claim_rank(*rendezvous.store, launch.rank, options.init_method);

  const auto agreed = c10::str("world size ", launch.world_size, ", backend ", backend);
  StoreAllGather all_gather(*rendezvous.store, launch.rank, launch.world_size, options.timeout);
  const auto disagreement = [&](int rank, const std::string& value) -> std::string {
    const auto theirs = split(value, '|').front();
    return theirs == agreed
               ? ""
               : c10::str(
                     "the ranks disagree: rank 0 has ", agreed, ", rank ", rank, " has ", theirs);
  };
  const auto machines = all_gather("hello", agreed + "|" + machine_id(), disagreement);
  const auto rank0 = split(machines[0], '|').front();
  FSDP_CHECK_AS(
      CommError, rank0 == agreed, "the ranks disagree: rank 0 has ", rank0, ", rank ", launch.rank,
      " has ", agreed);

  all_gather("same", to_line(options.same), [&](int rank, const std::string& line) {
    const auto found = differences(options.same, rank, line);
    return found.empty() ? "" : std::string(StoreAllGather::kConfig) + found;
  });

  const bool one_machine = std::all_of(
      machines.begin(), machines.end(), [&](const auto& m) { return m == machines[0]; });
  rendezvous.address = one_machine ? "127.0.0.1" : address_for_peers(master_host);
  rendezvous.liveness = std::make_shared<Liveness>(rendezvous.address);
  rendezvous.liveness->set_peers(all_gather(
      "alive", rendezvous.liveness->endpoint(), [](int, const std::string&) { return ""; }));
}

} // namespace

Rendezvous rendezvous(const InitOptions& options, const std::string& backend, LaunchEnv launch) {
  Rendezvous rendezvous;
  rendezvous.rank = launch.rank;
  if (launch.world_size == 1) {
    return rendezvous;
  }

  Endpoint master;
  auto& store = rendezvous.store;
  const auto tcp_store = [&](bool serve, bool one_machine) {
    return serve ? serve_store(master, one_machine) : connect_store(master, options.timeout);
  };
  const auto& method = options.init_method;
  if (method.starts_with("tcp://")) {
    master = parse_endpoint(method.substr(std::string("tcp://").size()), "init_method tcp://");
    store = tcp_store(launch.rank == 0, is_loopback(master.host));
  } else if (method.starts_with("file://")) {
    store = file_store(method, launch.world_size);
  } else {
    FSDP_CHECK_AS(
        ConfigError, method == "env://", "init_method '", method,
        "' is none of env://, tcp://host:port, file:///path");
    require_master(launch);
    master = {launch.master_addr, static_cast<uint16_t>(launch.master_port)};
    store = tcp_store(launch.rank == 0 && !launch.agent_store, launch.one_machine());
  }

  try {
    verify_world(rendezvous, options, backend, launch, master.host);
  } catch (const CommError&) {
    throw;
  } catch (const ConfigError&) {
    throw;
  } catch (...) {
    FSDP_THROW(
        CommError, "rank ", launch.rank, " lost the store while the ranks met: has rank 0 ended? (",
        current_exception_text(), ")");
  }
  return rendezvous;
}

} // namespace fsdp::detail
