// `./fsdp bench checkpoint` compares our saving and loading with torch.distributed.checkpoint
// (DCP) in one run: the same sharded model, the same number of processes, the same folder.
// In every round both sides save, load and save asynchronously, in turn. The side that
// begins changes with the round.
//
// Both sides sync their files at the end of a save (DCP does by default) and save into a folder
// that does not exist yet. Both load what they have just saved, so they read from the page
// cache. The slowest rank counts. The disk is synced before each measurement, and loaded values
// are checked.
//
// async    time until async_save returns, for which training waits
// compute beside async: each rank computes matrix products until the checkpoint is complete.
//          The figure is their time / their time without a save. If the ranks use all cores,
//          the save takes some of that time.
// GiB/s    measured until the checkpoint is complete
// The second table is of very many small tensors, each over all ranks: there the work per tensor
// counts. `verify` is what `fsdp verify` does; DCP has nothing like it.
// memory   the most resident memory of a rank during the call, beyond that before the call.
//          async_save keeps host memory for the next save, so there: beyond that of the model
#include <stdlib.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>

#include <fsdp/checkpoint_tools.h>

#include "bench_main.h"
#include "checkpoint_rank.h"
#include "checkpoint_report.h"
#include "child.h"

namespace {

using namespace bench;

constexpr int64_t kBlockMib = 32; // two matrices of kWidth x 4 kWidth
constexpr double kMib = 1 << 20;

struct Options {
  int64_t size_mib = 1024;
  int ranks = 2;
  int rounds = 3;
  int64_t tensors = 20'000;
  std::string folder = ".";
  std::string python = FSDP_BENCH_PYTHON;
  std::string script = FSDP_BENCH_DIR "/dcp_checkpoint.py";

  int64_t blocks() const {
    return (size_mib + kBlockMib - 1) / kBlockMib;
  }
};

/// The ranks of one side: processes that read commands and answer each with a line.
class RankProcesses {
 public:
  RankProcesses(
      std::vector<std::string> words,
      const Options& options,
      const std::string& rendezvous,
      int64_t tensors = 0)
      : name_(words[0]) {
    for (int rank = 0; rank < options.ranks; ++rank) {
      auto mine = words;
      for (const auto& word :
           {std::string("--rank"), std::to_string(rank), std::string("--ranks"),
            std::to_string(options.ranks), std::string("--blocks"),
            std::to_string(tensors > 0 ? 0 : options.blocks()), std::string("--tensors"),
            std::to_string(tensors), std::string("--rendezvous"), rendezvous}) {
        mine.push_back(word);
      }
      ranks_.push_back(std::make_unique<Child>(std::move(mine)));
    }
    for (auto& rank : ranks_) {
      std::istringstream hello(rank->read_line().value_or(""));
      std::string ready;
      int64_t bytes = 0;
      hello >> ready >> torch_ >> bytes;
      shard_bytes_ = std::max(shard_bytes_, bytes);
      model_bytes_ += bytes;
      is_there_ = is_there_ && ready == "ready" && hello;
    }
  }

  ~RankProcesses() {
    for (auto& rank : ranks_) {
      rank->close_input();
    }
  }
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  bool is_there() const {
    return is_there_;
  }
  const std::string& torch_version() const {
    return torch_;
  }
  /// Bytes of the parameters on the rank that has the most.
  int64_t shard_bytes() const {
    return shard_bytes_;
  }
  int64_t model_bytes() const {
    return model_bytes_;
  }

  Measured ask(const std::string& command, const std::string& path) {
    for (auto& rank : ranks_) {
      rank->tell(command + " " + path);
    }
    Measured all;
    bool is_known = true;
    for (auto& rank : ranks_) {
      std::istringstream answer(rank->read_line().value_or(""));
      Measured one;
      answer >> one.seconds >> one.total >> one.extra >> one.beside;
      TORCH_CHECK(answer, name_, " failed on '", command, "'");
      all.seconds = std::max(all.seconds, one.seconds);
      all.total = std::max(all.total, one.total);
      all.extra = std::max(all.extra, one.extra);
      all.beside = std::max(all.beside, one.beside);
      is_known = is_known && one.extra >= 0;
    }
    all.extra = is_known ? all.extra : -1;
    return all;
  }

 private:
  const std::string name_;
  std::vector<std::unique_ptr<Child>> ranks_;
  bool is_there_ = true;
  std::string torch_;
  int64_t shard_bytes_ = 0;
  int64_t model_bytes_ = 0; // of all ranks
};

/// A new folder that the destructor removes.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& parent) : path_(parent + "/bench_checkpoint_XXXXXX") {
    TORCH_CHECK(mkdtemp(path_.data()), path_, " cannot be made: ", strerror(errno));
    const std::unique_ptr<char, decltype(&std::free)> real(
        realpath(path_.c_str(), nullptr), &std::free);
    path_ = real.get();
  }
  ~TemporaryFolder() {
    remove("");
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string operator/(const std::string& name) const {
    return path_ + "/" + name;
  }
  /// Uses rm, because a supported version of torch exports broken parts of std::filesystem.
  void remove(const std::string& name) const {
    (void)!std::system(("rm -rf '" + path_ + "/" + name + "'").c_str());
  }

 private:
  std::string path_;
};

Result measure(
    const Options& options,
    const TemporaryFolder& folder,
    RankProcesses& ours,
    RankProcesses* dcp) {
  Result result;
  for (int round = 0; round < options.rounds; ++round) {
    for (const std::string command : kCommands) {
      for (const bool is_ours : {round % 2 == 0, round % 2 == 1}) {
        if (!is_ours && !dcp) {
          continue;
        }
        const std::string name = is_ours ? "ours" : "dcp";
        if (command != "load") {
          folder.remove(name);
        }
        sync();
        auto& rounds = is_ours ? result.ours : result.dcp;
        rounds[command].push_back((is_ours ? ours : *dcp).ask(command, folder / name));
      }
    }
  }
  return result;
}

/// The words that start the Python side.
std::vector<std::string> python_words(const Options& options) {
  return {options.python, options.script, "--width", std::to_string(kWidth)};
}

/// Measures many small tensors. Returns the seconds of the rounds by command and side.
std::map<std::string, std::vector<double>> measure_many(
    const Options& options, const TemporaryFolder& folder, bool has_dcp) {
  std::map<std::string, std::vector<double>> seconds;
  RankProcesses ours({"/proc/self/exe"}, options, folder / "many_ours", options.tensors);
  std::optional<RankProcesses> dcp;
  if (has_dcp) {
    dcp.emplace(python_words(options), options, folder / "many_dcp", options.tensors);
  }
  for (int round = 0; round < options.rounds; ++round) {
    folder.remove("ours");
    folder.remove("dcp");
    for (const std::string command : {"save", "load"}) {
      sync();
      seconds[command + "   ours"].push_back(ours.ask(command, folder / "ours").seconds);
      if (dcp) {
        seconds[command + "   DCP"].push_back(dcp->ask(command, folder / "dcp").seconds);
      }
    }
    const auto start = std::chrono::steady_clock::now();
    const auto report = fsdp::verify_checkpoint(folder / "ours");
    seconds["verify ours"].push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    TORCH_CHECK(report.problems.empty() && report.num_tensors == options.tensors);
  }
  return seconds;
}

int run(int argc, char** argv) {
  CLI::App app("Saving and loading: ours and torch.distributed.checkpoint's, in one run.");
  Options options;
  bool as_json = false;
  bool check = false;
  int worker_rank = -1;
  int64_t worker_blocks = 0;
  std::string rendezvous;
  app.add_option("--size-mib", options.size_mib, "Parameters, fp32, in steps of 32 MiB")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--ranks", options.ranks, "Processes of each side")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "Rounds, of which the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--tensors", options.tensors, "Small tensors of the second table; 0: none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--folder", options.folder, "Where to save; what is made there goes again")
      ->capture_default_str();
  app.add_option("--python", options.python, "An interpreter with torch")->capture_default_str();
  app.add_flag("--json", as_json, "One JSON object instead of the table");
  app.add_flag(
      "--check", check,
      "Exit 1 unless saving and loading are as fast as DCP's, async_save blocks for a tenth of a "
      "save at most, compute beside it takes 1.4 times as long at most, and memory beyond the "
      "model is at most 1.2 times a shard");
  app.add_option("--rank", worker_rank)->group("");
  app.add_option("--blocks", worker_blocks)->group("");
  app.add_option("--rendezvous", rendezvous)->group("");
  CLI11_PARSE(app, argc, argv);
  if (worker_rank >= 0) {
    return Rank::work(worker_rank, options.ranks, rendezvous, worker_blocks, options.tensors);
  }

  const TemporaryFolder folder(options.folder);
  RankProcesses ours({"/proc/self/exe"}, options, folder / "rendezvous_ours");
  TORCH_CHECK(ours.is_there(), "our own processes did not start");
  auto dcp =
      std::make_unique<RankProcesses>(python_words(options), options, folder / "rendezvous_dcp");
  if (!dcp->is_there()) {
    fprintf(stderr, "no Python side (%s): it could not start\n", options.python.c_str());
    dcp.reset();
  }
  const auto shard_bytes = ours.shard_bytes();
  TORCH_CHECK(
      !dcp || dcp->shard_bytes() == shard_bytes, "the sides have shards of ", shard_bytes, " and ",
      dcp ? dcp->shard_bytes() : 0, " bytes");
  if (!as_json) {
    printf(
        "%.0f MiB of fp32 parameters on %d ranks, as processes with one thread; %d rounds in "
        "turn\n\n",
        static_cast<double>(ours.model_bytes()) / kMib, options.ranks, options.rounds);
    fflush(stdout);
  }
  const Report report(measure(options, folder, ours, dcp.get()), shard_bytes, ours.model_bytes());
  const bool has_dcp = dcp != nullptr;
  const auto python_torch = dcp ? json(dcp->torch_version()) : json();
  dcp.reset(); // its processes go before the next ones begin
  std::map<std::string, std::vector<double>> many;
  if (options.tensors > 0) {
    many = measure_many(options, folder, has_dcp);
  }
  if (as_json) {
    auto out = report.to_json();
    for (const auto& [name, seconds] : many) {
      out["many"][name] = Figure(seconds).to_json();
    }
    out["options"] = {
        {"size_mib", options.blocks() * kBlockMib},
        {"ranks", options.ranks},
        {"rounds", options.rounds},
        {"torch", ours.torch_version()},
        {"tensors", options.tensors},
        {"python_torch", python_torch}};
    std::cout << out << std::endl;
  } else {
    report.print();
    if (!many.empty()) {
      printf(
          "\n%lld tensors of %lld elements, in seconds\n", static_cast<long long>(options.tensors),
          static_cast<long long>(kSmall));
    }
    for (const auto& [name, seconds] : many) {
      const Figure figure(seconds);
      printf(
          "%-12s %9.3f   [%7.3f, %7.3f]\n", name.c_str(), figure.median, figure.low, figure.high);
    }
  }
  if (!check) {
    return 0;
  }
  const auto complaints = report.complaints();
  for (const auto& complaint : complaints) {
    fprintf(stderr, "checkpoint: %s\n", complaint.c_str());
  }
  return complaints.empty() ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
  return bench_main("checkpoint", run, argc, argv);
}
