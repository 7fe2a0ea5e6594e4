// `./fsdp bench checkpoint`: saving and loading, ours next to torch.distributed.checkpoint
// (DCP), in one run: the same sharded model, the same number of processes, the same folder.
// In every round both sides save, load and save asynchronously, in turn; who is first
// changes with the round.
//
// Both sync their files before they are done (DCP by default), save into a folder that is
// not there yet, and load what they just saved, so from the page cache. The slowest rank
// counts. Before each measurement nothing waits to be written, and what is loaded is checked.
//
// async    until async_save returns: what training waits for
// memory   the most that a rank was resident during the call, beyond what it was before; for
//          async_save, which keeps its host memory for the next one, beyond the model
#include <malloc.h>
#include <stdlib.h>
#include <torch/torch.h>
#include <torch/version.h>
#include <unistd.h>

#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>

#include "bench_main.h"
#include "child.h"
#include "measure.h"

namespace {

using nlohmann::json;

constexpr int64_t kWidth = 1024;
constexpr int64_t kBlockMib = 32; // two matrices of kWidth x 4 kWidth
constexpr double kMib = 1 << 20;
constexpr double kGib = 1 << 30;

// What must hold with --check.
constexpr double kMinSpeed = 1;    // DCP's time / ours
constexpr double kMaxAsync = 0.1;  // of our blocking save
constexpr double kMaxMemory = 1.2; // of a rank's shard

struct Options {
  int64_t size_mib = 1024;
  int ranks = 2;
  int rounds = 3;
  std::string folder = ".";
  std::string python = FSDP_BENCH_PYTHON;
  std::string script = FSDP_BENCH_DIR "/dcp_checkpoint.py";

  int64_t blocks() const {
    return (size_mib + kBlockMib - 1) / kBlockMib;
  }
};

/// Of one command, the slowest and largest of all ranks.
struct Measured {
  double seconds = 0; // until the call returned
  double total = 0;   // until the checkpoint was there
  double extra = 0;   // bytes; negative: unknown
};

// ------------------------------------------------------------ One rank of ours

// The model of dcp_checkpoint.py: change both.

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : up(register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", torch::nn::Linear(4 * kWidth, kWidth))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    return down(torch::relu(up(x)));
  }

  torch::nn::Linear up, down;
};
FSDP_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(int64_t num_blocks) {
    for (int64_t i = 0; i < num_blocks; ++i) { // the whole model is never there
      auto block = register_module("block" + std::to_string(i), Block());
      fsdp::fully_shard(block);
      blocks.push_back(block);
    }
  }

  std::vector<Block> blocks;
};
TORCH_MODULE(Model);

/// A field of /proc/self/status, in bytes.
double memory(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) {
      return std::stod(line.substr(field.size() + 1)) * 1024;
    }
  }
  return -1;
}

/// VmHWM starts again from what is resident now; false where the kernel cannot.
bool reset_peak() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;
  return file.good();
}

class Rank {
 public:
  explicit Rank(int64_t blocks) : model_(blocks), state_(fsdp::get_model_state_dict(model_)) {
    malloc_trim(0);
    model_bytes_ = memory("VmRSS");
  }

  int64_t shard_bytes() const {
    int64_t bytes = 0;
    for (const auto& shard : shards()) {
      bytes += static_cast<int64_t>(shard.nbytes());
    }
    return bytes;
  }

  Measured run(const std::string& command, const std::string& path) {
    const auto expected = checksum();
    if (command == "load") {
      for (auto& shard : shards()) {
        shard.zero_();
      }
    }
    malloc_trim(0);
    fsdp::default_group().barrier();
    const auto before = command == "async" ? model_bytes_ : memory("VmRSS");
    const bool is_known = reset_peak();
    const auto start = std::chrono::steady_clock::now();
    const auto seconds = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    Measured measured;
    if (command == "save") {
      fsdp::save(state_, path);
    } else if (command == "load") {
      fsdp::load(state_, path);
    } else {
      auto future = fsdp::async_save(state_, path);
      measured.seconds = seconds();
      future.get();
    }
    measured.total = seconds();
    measured.seconds = command == "async" ? measured.seconds : measured.total;
    measured.extra = is_known ? memory("VmHWM") - before : -1;
    TORCH_CHECK(checksum() == expected, command, " changed the tensors");
    return measured;
  }

  static int work(int rank, int ranks, const std::string& rendezvous, int64_t blocks) {
    const torch::NoGradGuard no_grad;
    torch::set_num_threads(1);
    fsdp::init_process_group(
        {.backend = "gloo",
         .init_method = "file://" + rendezvous,
         .rank = rank,
         .world_size = ranks});
    {
      Rank self(blocks);
      std::cout << "ready " TORCH_VERSION " " << self.shard_bytes() << std::endl;
      for (std::string command, path;
           std::cin >> command >> std::ws && std::getline(std::cin, path);) {
        const auto measured = self.run(command, path);
        std::cout << measured.seconds << " " << measured.total << " "
                  << static_cast<int64_t>(measured.extra) << std::endl;
      }
    }
    fsdp::destroy_process_group();
    return 0;
  }

 private:
  std::vector<torch::Tensor> shards() const {
    std::vector<torch::Tensor> found;
    for (const auto& [key, value] : state_) {
      found.push_back(std::get<fsdp::DTensor>(value).to_local().detach());
    }
    return found;
  }

  double checksum() const {
    double sum = 0;
    for (const auto& shard : shards()) {
      sum += shard.sum(torch::kDouble).item<double>();
    }
    return sum;
  }

  Model model_;
  fsdp::StateDict state_; // the live shards
  double model_bytes_ = 0;
};

// ------------------------------------------------------------ The ranks of one side

/// Processes that wait for commands on stdin, and answer each with a line.
class Side {
 public:
  Side(std::vector<std::string> words, const Options& options, const std::string& rendezvous)
      : name_(words[0]) {
    for (int rank = 0; rank < options.ranks; ++rank) {
      auto mine = words;
      for (const auto& word :
           {std::string("--rank"), std::to_string(rank), std::string("--ranks"),
            std::to_string(options.ranks), std::string("--blocks"),
            std::to_string(options.blocks()), std::string("--rendezvous"), rendezvous}) {
        mine.push_back(word);
      }
      ranks_.push_back(std::make_unique<bench::Child>(std::move(mine)));
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

  ~Side() {
    for (auto& rank : ranks_) {
      rank->hang_up();
    }
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  bool is_there() const {
    return is_there_;
  }
  const std::string& torch_version() const {
    return torch_;
  }
  /// Bytes of the parameters on the rank that has most of them.
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
      answer >> one.seconds >> one.total >> one.extra;
      TORCH_CHECK(answer, name_, " failed on '", command, "'");
      all.seconds = std::max(all.seconds, one.seconds);
      all.total = std::max(all.total, one.total);
      all.extra = std::max(all.extra, one.extra);
      is_known = is_known && one.extra >= 0;
    }
    all.extra = is_known ? all.extra : -1;
    return all;
  }

 private:
  const std::string name_;
  std::vector<std::unique_ptr<bench::Child>> ranks_;
  bool is_there_ = true;
  std::string torch_;
  int64_t shard_bytes_ = 0;
  int64_t model_bytes_ = 0; // of all ranks
};

/// A new folder that goes with this object.
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
  /// By rm: one supported torch exports its own, broken parts of std::filesystem.
  void remove(const std::string& name) const {
    (void)!std::system(("rm -rf '" + path_ + "/" + name + "'").c_str());
  }

 private:
  std::string path_;
};

// ------------------------------------------------------------ Rounds and report

constexpr const char* kCommands[] = {"save", "load", "async"};

/// By command: the rounds.
using Rounds = std::map<std::string, std::vector<Measured>>;

struct Result {
  Rounds ours;
  Rounds dcp; // empty: no Python
};

Result measure(const Options& options, const TemporaryFolder& folder, Side& ours, Side* dcp) {
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

/// The median of the rounds and, as spread, the least and the most.
struct Figure {
  double median = 0, low = 0, high = 0;

  explicit Figure(const std::vector<double>& values)
      : median(bench::median(values)),
        low(*std::min_element(values.begin(), values.end())),
        high(*std::max_element(values.begin(), values.end())) {}
  json to_json() const {
    return {{"median", median}, {"low", low}, {"high", high}};
  }
};

Figure seconds(const std::vector<Measured>& rounds) {
  std::vector<double> values;
  for (const auto& round : rounds) {
    values.push_back(round.seconds);
  }
  return Figure(values);
}

/// Taken within each round.
Figure ratio(const std::vector<Measured>& above, const std::vector<Measured>& below) {
  std::vector<double> values;
  for (size_t i = 0; i < above.size(); ++i) {
    values.push_back(above[i].seconds / below[i].seconds);
  }
  return Figure(values);
}

/// The most of all rounds, in shards; negative: unknown.
double most_memory(const std::vector<Measured>& rounds, int64_t shard_bytes) {
  double most = 0;
  for (const auto& round : rounds) {
    if (round.extra < 0) {
      return -1;
    }
    most = std::max(most, round.extra / static_cast<double>(shard_bytes));
  }
  return most;
}

class Report {
 public:
  Report(Result result, int64_t shard_bytes, int64_t model_bytes)
      : result_(std::move(result)),
        shard_bytes_(shard_bytes),
        model_gib_(static_cast<double>(model_bytes) / kGib) {}

  void print() const {
    printf(
        "%-6s %-5s %9s %19s %8s %15s\n", "", "", "seconds", "[least, most]", "GiB/s",
        "memory / shard");
    for (const std::string command : kCommands) {
      print_row(command, "ours", result_.ours.at(command));
      if (has_dcp()) {
        print_row(command, "DCP", result_.dcp.at(command));
      }
    }
    printf("\n%-26s %9s %19s\n", "ratio", "median", "[least, most]");
    for (const std::string command : kCommands) {
      if (has_dcp()) {
        print_ratio(command + ": DCP / ours", speed(command));
      }
    }
    print_ratio("our async / our save", async_part());
  }

  json to_json() const {
    json out;
    const auto add = [&](const char* side, const Rounds& rounds) {
      for (const auto& [command, measured] : rounds) {
        auto& place = out[side][command];
        place["seconds"] = seconds(measured).to_json();
        place["memory_per_shard"] = most_memory(measured, shard_bytes_);
        if (command == "async") {
          std::vector<double> totals;
          for (const auto& one : measured) {
            totals.push_back(one.total);
          }
          place["seconds_until_saved"] = Figure(totals).to_json();
        }
      }
    };
    add("ours", result_.ours);
    add("dcp", result_.dcp);
    for (const std::string command : kCommands) {
      if (has_dcp()) {
        out["dcp_over_ours"][command] = speed(command).to_json();
      }
    }
    out["async_over_save"] = async_part().to_json();
    out["shard_bytes"] = shard_bytes_;
    return out;
  }

  /// What is not as it must be.
  std::vector<std::string> complaints() const {
    std::vector<std::string> found;
    const auto expect = [&](bool good, const std::string& what) {
      if (!good) {
        found.push_back(what);
      }
    };
    expect(has_dcp(), "there was no Python side to compare with");
    for (const std::string command : {"save", "load"}) {
      expect(!has_dcp() || speed(command).median >= kMinSpeed, command + " is slower than DCP's");
    }
    expect(
        async_part().median <= kMaxAsync,
        c10::str("async_save blocks for more than ", kMaxAsync, " of a save"));
    for (const std::string command : kCommands) {
      const auto memory = most_memory(result_.ours.at(command), shard_bytes_);
      expect(
          memory >= 0 && memory <= kMaxMemory,
          c10::str(
              command, " takes ", memory < 0 ? "an unknown amount of" : "too much", " memory"));
    }
    return found;
  }

 private:
  bool has_dcp() const {
    return !result_.dcp.empty();
  }
  Figure speed(const std::string& command) const {
    return ratio(result_.dcp.at(command), result_.ours.at(command));
  }
  Figure async_part() const {
    return ratio(result_.ours.at("async"), result_.ours.at("save"));
  }
  void print_row(
      const std::string& command, const char* side, const std::vector<Measured>& rounds) const {
    const auto figure = seconds(rounds);
    printf(
        "%-6s %-5s %9.3f   [%7.3f, %7.3f]", command.c_str(), side, figure.median, figure.low,
        figure.high);
    if (command == "async") { // the bytes are not written yet
      printf(" %8s", "");
    } else {
      printf(" %8.2f", model_gib_ / figure.median);
    }
    const auto memory = most_memory(rounds, shard_bytes_);
    printf(" %15s\n", memory < 0 ? "unknown" : c10::str(std::round(memory * 100) / 100).c_str());
  }
  static void print_ratio(const std::string& name, const Figure& figure) {
    printf("%-26s %9.2f   [%7.2f, %7.2f]\n", name.c_str(), figure.median, figure.low, figure.high);
  }

  const Result result_;
  const int64_t shard_bytes_;
  const double model_gib_;
};

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
  app.add_option("--folder", options.folder, "Where to save; what is made there goes again")
      ->capture_default_str();
  app.add_option("--python", options.python, "An interpreter with torch")->capture_default_str();
  app.add_flag("--json", as_json, "One JSON object instead of the table");
  app.add_flag(
      "--check", check,
      "Exit 1 unless saving and loading are as fast as DCP's, async_save blocks for a tenth of a "
      "save at most, and memory beyond the model is at most 1.2 times a shard");
  app.add_option("--rank", worker_rank)->group("");
  app.add_option("--blocks", worker_blocks)->group("");
  app.add_option("--rendezvous", rendezvous)->group("");
  CLI11_PARSE(app, argc, argv);
  if (worker_rank >= 0) {
    return Rank::work(worker_rank, options.ranks, rendezvous, worker_blocks);
  }

  const TemporaryFolder folder(options.folder);
  Side ours({"/proc/self/exe"}, options, folder / "rendezvous_ours");
  TORCH_CHECK(ours.is_there(), "our own processes did not start");
  auto dcp = std::make_unique<Side>(
      std::vector<std::string>{options.python, options.script, "--width", std::to_string(kWidth)},
      options, folder / "rendezvous_dcp");
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
  if (as_json) {
    auto out = report.to_json();
    out["options"] = {
        {"size_mib", options.blocks() * kBlockMib},
        {"ranks", options.ranks},
        {"rounds", options.rounds},
        {"torch", ours.torch_version()},
        {"python_torch", dcp ? json(dcp->torch_version()) : json()}};
    std::cout << out << std::endl;
  } else {
    report.print();
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
  return bench::bench_main("checkpoint", run, argc, argv);
}
