// `./fsdp bench train` compares `fsdp train` with the same training by Python FSDP2 in one run:
//
//   threads  fsdp train --ranks N
//   gloo     fsdp run -n N -- fsdp train
//   python   train.py, N processes over gloo: the same model, weights, text, batches, optimizer
//
// The three take turns. In every round each begins the training anew and takes its first steps.
// Losses and gradient norms must agree before speeds are shown. The figure of a round is that of
// the median step, without the first few; tokens/s are of all ranks together. Every rank has
// cores / ranks threads to compute with, as `fsdp train` has by default.
#include <signal.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench_main.h"
#include "child.h"
#include "measure.h"

namespace {

using namespace bench;
using nlohmann::json;

// The largest allowed difference of losses and gradient norms between ours and Python's, and the
// number of first steps that are compared. Rounding gave 5e-7 with the default options and 2e-5
// with a short warm-up, and it grows with the steps. A missing weight decay or rotary position
// gave more than 1e-3.
constexpr double kTolerance = 1e-4;
constexpr size_t kCompared = 12;

struct Options {
  int ranks = 4;
  int rounds = 5;
  int steps = 12;
  int warmup = 3;
  double min_threads = 1.5;
  double min_gloo = 1.1;
  std::string tool = FSDP_BENCH_TOOL;
  std::string python = FSDP_BENCH_PYTHON;
  std::vector<std::string> job; // options of fsdp train

  int threads_per_rank() const {
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / ranks);
  }
};

/// What the first steps of a training reported.
struct Steps {
  std::vector<double> losses, grad_norms, seconds;

  void add(const json& step) {
    losses.push_back(step.at("loss"));
    grad_norms.push_back(step.at("grad_norm"));
    seconds.push_back(step.at("seconds"));
  }
  size_t size() const {
    return losses.size();
  }
  double median_seconds(int warmup) const {
    return median({seconds.begin() + warmup, seconds.end()});
  }
};

// ------------------------------------------------------------ Ours

/// The command line of `fsdp train`, with ranks as processes or as threads.
std::vector<std::string> tool_words(const Options& options, bool as_processes) {
  const auto ranks = std::to_string(options.ranks);
  std::vector<std::string> words{options.tool};
  const auto add = [&](const std::vector<std::string>& more) {
    words.insert(words.end(), more.begin(), more.end());
  };
  if (as_processes) {
    add({"run", "-n", ranks, "--", options.tool});
  }
  add({"train", "--json", "--device", "cpu"});
  if (!as_processes) {
    add({"--ranks", ranks});
  }
  add(options.job);
  return words;
}

/// All options of the training by name, as `fsdp train --dry-run` reports them.
json config_of(const Options& options) {
  auto words = tool_words(options, /*as_processes=*/false);
  words.emplace_back("--dry-run");
  Child tool(words);
  const auto plan = json::parse(tool.read_line().value_or(""), nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK(plan.is_object() && plan.contains("config"), options.tool, " train has no plan");
  return plan["config"];
}

/// Runs the tool for `options.steps` steps, then stops it before it has finished.
Steps run_tool(const Options& options, bool as_processes) {
  const std::unique_ptr<FILE, int (*)(FILE*)> complaints(tmpfile(), fclose);
  TORCH_CHECK(complaints, "no temporary file");
  auto words = tool_words(options, as_processes);
  words.emplace_back("--no-save");
  Steps steps;
  {
    Child tool(words, fileno(complaints.get()));
    while (const auto line = tool.read_line()) { // to the end, so that its pipe never fills up
      const auto begin = std::min(line->find('{'), line->size()); // skips "[rank 0] "
      const auto event = json::parse(line->substr(begin), nullptr, /*allow_exceptions=*/false);
      if (!event.is_object() || event.value("event", "") != "step" ||
          steps.size() == static_cast<size_t>(options.steps)) {
        continue;
      }
      steps.add(event);
      if (steps.size() == static_cast<size_t>(options.steps)) {
        tool.send_signal(SIGTERM);
      }
    }
  }
  if (steps.size() < static_cast<size_t>(options.steps)) {
    rewind(complaints.get());
    for (int c = fgetc(complaints.get()); c != EOF; c = fgetc(complaints.get())) {
      fputc(c, stderr);
    }
    TORCH_CHECK(false, options.tool, " train ended after ", steps.size(), " steps");
  }
  return steps;
}

// ------------------------------------------------------------ Python's

/// The ranks of train.py. The processes live through all rounds.
class Python {
 public:
  Python(const Options& options, const json& config) {
    const auto port = std::to_string(free_port());
    for (int rank = 0; rank < options.ranks; ++rank) {
      children_.push_back(std::make_unique<Child>(std::vector<std::string>{
          options.python, FSDP_BENCH_DIR "/train.py", "--rank", std::to_string(rank),
          "--world-size", std::to_string(options.ranks), "--port", port, "--threads",
          std::to_string(options.threads_per_rank()), "--config", config.dump()}));
    }
    for (auto& child : children_) {
      TORCH_CHECK(child->read_line() == "ready", options.python, " cannot run train.py");
    }
  }

  ~Python() {
    for (auto& child : children_) {
      child->close_input();
    }
  }
  Python(const Python&) = delete;
  Python& operator=(const Python&) = delete;

  /// Begins the training anew and returns the steps of rank 0.
  Steps run(int num_steps) {
    for (auto& child : children_) {
      child->tell(std::to_string(num_steps));
    }
    Steps steps;
    for (int step = 0; step < num_steps; ++step) {
      steps.add(json::parse(children_.front()->answer()));
      for (size_t rank = 1; rank < children_.size(); ++rank) {
        children_[rank]->answer();
      }
    }
    return steps;
  }

 private:
  std::vector<std::unique_ptr<Child>> children_;
};

// ------------------------------------------------------------ Rounds and report

/// The largest difference of the first steps. Throws if it is more than a rounding error.
double difference(const std::string& kind, const Steps& ours, const Steps& python) {
  double largest = 0;
  for (size_t i = 0; i < std::min(python.size(), kCompared); ++i) {
    const auto apart = std::max(
        std::abs(ours.losses[i] - python.losses[i]),
        std::abs(ours.grad_norms[i] - python.grad_norms[i]));
    TORCH_CHECK(
        apart <= kTolerance, "this is not the same training: in step ", i + 1, " ", kind,
        " has loss ", ours.losses[i], " and gradient norm ", ours.grad_norms[i], ", Python has ",
        python.losses[i], " and ", python.grad_norms[i]);
    largest = std::max(largest, apart);
  }
  return largest;
}

struct Rounds {
  std::map<std::string, std::vector<double>> seconds; // of a step, by kind and round
  double difference = 0;

  std::vector<double> ratios(const std::string& kind) const {
    const auto& python = seconds.at("python");
    return by_round(python.size(), [&](size_t i) { return python[i] / seconds.at(kind)[i]; });
  }
};

Rounds measure(const Options& options, const json& config) {
  Python python(options, config);
  std::vector<std::string> kinds{"threads", "gloo", "python"};
  Rounds rounds;
  for (int round = 0; round < options.rounds; ++round) {
    std::map<std::string, Steps> steps;
    for (const auto& kind : kinds) {
      steps[kind] =
          kind == "python" ? python.run(options.steps) : run_tool(options, kind == "gloo");
      rounds.seconds[kind].push_back(steps[kind].median_seconds(options.warmup));
    }
    for (const auto* ours : {"threads", "gloo"}) {
      rounds.difference =
          std::max(rounds.difference, difference(ours, steps[ours], steps["python"]));
    }
    std::reverse(kinds.begin(), kinds.end());
  }
  return rounds;
}

double bound_of(const Options& options, const std::string& kind) {
  return kind == "threads" ? options.min_threads : options.min_gloo;
}

bool meets_bound(const Options& options, const std::string& kind, const Rounds& rounds) {
  return median(rounds.ratios(kind)) >= bound_of(options, kind);
}

/// tokens/s of all ranks together.
Figure tokens_per_second(const json& config, const std::vector<double>& seconds) {
  const double tokens = config.at("batch").get<double>() * config.at("context").get<double>();
  return Figure(by_round(seconds.size(), [&](size_t i) { return tokens / seconds[i]; }));
}

void print(const Options& options, const json& config, const Rounds& rounds) {
  const auto number = [&](const char* name) { return config.at(name).get<int64_t>(); };
  printf(
      "fsdp train, %d of %ld steps: dim %ld, %ld layers, %ld x %ld tokens, %d ranks, threads per "
      "rank: %d\n",
      options.steps, number("steps"), number("dim"), number("layers"), number("batch"),
      number("context"), options.ranks, options.threads_per_rank());
  printf(
      "  %-8s %10s %20s %12s %16s   %s\n", "", "tokens/s", "[quartiles]", "to python",
      "[quartiles]", "at least");
  for (const auto* kind : {"threads", "gloo", "python"}) {
    const auto speed = tokens_per_second(config, rounds.seconds.at(kind));
    printf("  %-8s %10.0f   [%7.0f, %7.0f]", kind, speed.median, speed.low, speed.high);
    if (std::string(kind) != "python") {
      const Figure ratio(rounds.ratios(kind));
      printf(
          " %12.2f   [%5.2f, %5.2f]   %.2f: %s", ratio.median, ratio.low, ratio.high,
          bound_of(options, kind), meets_bound(options, kind, rounds) ? "kept" : "MISSED");
    }
    printf("\n");
  }
  printf(
      "  losses and gradient norms of the first steps differ from Python's by %.1e at most\n",
      rounds.difference);
}

json to_json(const Options& options, const json& config, const Rounds& rounds) {
  json out{
      {"config", config},
      {"ranks", options.ranks},
      {"threads_per_rank", options.threads_per_rank()},
      {"largest_difference", rounds.difference}};
  for (const auto& [kind, seconds] : rounds.seconds) {
    out[kind] = {
        {"seconds_per_step", Figure(seconds).to_json()},
        {"tokens_per_second", tokens_per_second(config, seconds).to_json()}};
    if (kind != "python") {
      out[kind]["ratio"] = Figure(rounds.ratios(kind)).to_json();
      out[kind]["min_ratio"] = bound_of(options, kind);
    }
  }
  return out;
}

int run(int argc, char** argv) {
  CLI::App app("The first steps of fsdp train and of the same job by Python FSDP2, in one run.");
  Options options;
  bool as_json = false;
  app.add_option("--ranks", options.ranks, "Ranks")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "Rounds, of which the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--steps", options.steps, "Steps of each in a round")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--warmup", options.warmup, "Those of them, at first, that do not count")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--min-threads", options.min_threads, "Exit 1 below so many times Python's")
      ->capture_default_str();
  app.add_option("--min-gloo", options.min_gloo, "The same of ranks as processes")
      ->capture_default_str();
  app.add_option("--tool", options.tool, "The fsdp to measure")->capture_default_str();
  app.add_option("--python", options.python, "An interpreter with torch")->capture_default_str();
  app.add_flag("--json", as_json, "One JSON object instead of the table");
  app.add_option("job", options.job, "Options of fsdp train, behind --");
  app.footer("Example: ./fsdp bench train --ranks 2 -- --model small --context 256");
  CLI11_PARSE(app, argc, argv);
  // For ranks as processes; ranks as threads divide the cores by default.
  setenv("OMP_NUM_THREADS", std::to_string(options.threads_per_rank()).c_str(), /*replace=*/1);
  const auto config = config_of(options);
  TORCH_CHECK(
      options.warmup < options.steps && options.steps < config.at("steps").get<int>(), "--steps ",
      options.steps, ": they must be more than --warmup, and less than those of the job, ",
      config.at("steps"));
  const auto rounds = measure(options, config);
  if (as_json) {
    std::cout << to_json(options, config, rounds) << std::endl;
  } else {
    print(options, config, rounds);
  }
  return meets_bound(options, "threads", rounds) && meets_bound(options, "gloo", rounds) ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
  return bench::bench_main("train", run, argc, argv);
}
