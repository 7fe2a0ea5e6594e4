// `./fsdp bench step` compares whole training steps with real communication on the CPU, in one
// run:
//
//   gloo     ours, ranks as processes
//   python   Python FSDP2 over gloo, ranks as processes: the same model, batch and optimizer
//   threads  ours, ranks as threads of one process
//
// The three take turns; the others sleep. Every rank computes with one thread. tokens/s are of
// all ranks together. "exposed" is the time of a sharded step less that of the same step of the
// plain model: communication that is not hidden behind compute, and the host cost of sharding.
// Every rank has a batch of its own. The losses of its first steps must be the same on all
// sides, otherwise the program exits with 1.
#include <torch/torch.h>

#include <fsdp/fsdp.h>
#include <fsdp/optim.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>

#include "bench_main.h"
#include "child.h"
#include "measure.h"
#include "transformer.h"

namespace {

using namespace bench;
using nlohmann::json;

struct Options {
  TransformerOptions model{.dim = 128, .layers = 8};
  int64_t batch = 2; // sequences per rank
  int64_t sequence = 64;
  std::vector<int> ranks{2, 4};
  int rounds = 7;
  int steps = 5;
  std::string python = FSDP_BENCH_PYTHON;

  int64_t tokens(int num_ranks) const {
    return num_ranks * batch * sequence;
  }
};

/// Seconds of a step, and the losses of the first steps, one rank after another.
struct Timed {
  double seconds = 0;
  std::vector<double> losses;
};

// ------------------------------------------------------------ One rank

constexpr int kFirstSteps = 3; // step.py has the same

/// A model, plain or sharded over the default group, and its training step.
class ModelUnderTest {
 public:
  ModelUnderTest(const Options& options, bool sharded)
      : net_(options.model),
        batch_(options.batch, options.sequence, options.model.vocabulary, fsdp::get_rank()) {
    fill_parameters(*net_);
    if (sharded) {
      shard(net_, {.reshard_after_forward = true});
    }
    optimizer_ = std::make_unique<fsdp::optim::AdamW>(net_->parameters(), /*lr=*/1e-4);
    for (int i = 0; i < kFirstSteps; ++i) {
      losses_.push_back(step());
    }
  }

  double step() {
    auto loss = loss_of(net_, batch_);
    loss.backward();
    optimizer_->step();
    optimizer_->zero_grad();
    return loss.item<double>();
  }

  /// Returns the median time of the steps. One more step before them warms up.
  Timed time(int steps) {
    step();
    std::vector<double> times;
    for (int i = 0; i < steps; ++i) {
      const auto start = now();
      step();
      times.push_back(now() - start);
    }
    return {median(times), losses_};
  }

 private:
  Transformer net_;
  const Batch batch_;
  std::vector<double> losses_; // of the first steps
  std::unique_ptr<fsdp::optim::AdamW> optimizer_;
};

/// What this process does if the benchmark has started it as a child.
struct Worker {
  std::string kind; // "gloo" or "threads"; "": this process is not a child
  int rank = 0;
  int num_ranks = 1;
  int port = 0;
};

/// Reads commands "plain N" or "fsdp N" and answers with the seconds of a step, then the
/// losses.
void answer(const std::function<Timed(bool sharded, int steps)>& time) {
  printf("ready\n");
  fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string form;
    int steps = 0;
    words >> form >> steps;
    const auto timed = time(form == "fsdp", steps);
    printf("%.9f", timed.seconds);
    for (const auto loss : timed.losses) {
      printf(" %.9f", loss);
    }
    printf("\n");
    fflush(stdout);
  }
}

void work_over_gloo(const Options& options, const Worker& worker) {
  torch::set_num_threads(1);
  fsdp::init_process_group(
      {.backend = "gloo",
       .init_method = c10::str("tcp://127.0.0.1:", worker.port),
       .rank = worker.rank,
       .world_size = worker.num_ranks});
  {
    ModelUnderTest plain(options, /*sharded=*/false);
    ModelUnderTest sharded(options, /*sharded=*/true);
    answer([&](bool of_sharded, int steps) { return (of_sharded ? sharded : plain).time(steps); });
  }
  fsdp::destroy_process_group();
}

/// Rank 0's seconds and all ranks' losses.
Timed merge_ranks(const std::vector<Timed>& ranks) {
  Timed result{.seconds = ranks.front().seconds, .losses = {}};
  for (const auto& each : ranks) {
    result.losses.insert(result.losses.end(), each.losses.begin(), each.losses.end());
  }
  return result;
}

void work_in_threads(const Options& options, const Worker& worker) {
  answer([&](bool sharded, int steps) {
    std::vector<Timed> timed(worker.num_ranks);
    fsdp::run_ranks(
        worker.num_ranks,
        [&](int rank) {
          ModelUnderTest side(options, sharded);
          fsdp::default_group().barrier();
          timed[rank] = side.time(steps);
        },
        {.intra_op_threads = 1});
    return merge_ranks(timed);
  });
}

// ------------------------------------------------------------ Jobs

/// The child processes of one kind with one number of ranks.
class Job {
 public:
  Job(const Options& options, const std::string& kind, int num_ranks) {
    const int port = free_port();
    const int processes = kind == "threads" ? 1 : num_ranks;
    for (int rank = 0; rank < processes; ++rank) {
      std::vector<std::string> words{"/proc/self/exe", "--worker", kind};
      if (kind == "python") {
        words = {options.python, FSDP_BENCH_DIR "/step.py"};
      }
      const auto add = [&](const char* name, int64_t value) {
        words.insert(words.end(), {std::string("--") + name, std::to_string(value)});
      };
      add("rank", rank);
      add("world-size", num_ranks);
      add("port", port);
      add("dim", options.model.dim);
      add("layers", options.model.layers);
      add("batch", options.batch);
      add("sequence", options.sequence);
      children_.push_back(std::make_unique<Child>(std::move(words)));
    }
    for (auto& child : children_) {
      const auto line = child->read_line();
      is_ready_ = is_ready_ && line == "ready";
    }
  }

  bool is_ready() const {
    return is_ready_;
  }

  Timed time(const std::string& form, int steps) {
    for (auto& child : children_) {
      child->tell(c10::str(form, " ", steps));
    }
    std::vector<Timed> ranks;
    for (auto& child : children_) {
      std::istringstream numbers(child->answer());
      auto& timed = ranks.emplace_back();
      numbers >> timed.seconds;
      for (double loss = 0; numbers >> loss;) {
        timed.losses.push_back(loss);
      }
    }
    return merge_ranks(ranks);
  }

 private:
  std::vector<std::unique_ptr<Child>> children_;
  bool is_ready_ = true;
};

// ------------------------------------------------------------ Rounds and report

/// The results of all rounds. `plain` and `sharded` are the seconds of a step, by round.
struct Rounds {
  std::vector<double> plain;
  std::vector<double> sharded;
  /// Losses of the first steps: all ranks of the plain model, then all of the sharded one.
  std::vector<double> losses;

  std::vector<double> exposed() const {
    auto result = sharded;
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] -= plain[i];
    }
    return result;
  }
};

std::map<std::string, Rounds> measure(const Options& options, int num_ranks) {
  std::vector<std::pair<std::string, std::unique_ptr<Job>>> jobs;
  for (const auto* kind : {"gloo", "python", "threads"}) {
    auto job = std::make_unique<Job>(options, kind, num_ranks);
    if (job->is_ready()) {
      jobs.emplace_back(kind, std::move(job));
    } else {
      fprintf(stderr, "%s: could not start\n", kind);
    }
  }
  std::map<std::string, Rounds> rounds;
  for (int round = 0; round < options.rounds; ++round) {
    for (auto& [kind, job] : jobs) {
      auto& of_kind = rounds[kind];
      const auto plain = job->time("plain", options.steps);
      const auto sharded = job->time("fsdp", options.steps);
      of_kind.plain.push_back(plain.seconds);
      of_kind.sharded.push_back(sharded.seconds);
      of_kind.losses = plain.losses;
      of_kind.losses.insert(of_kind.losses.end(), sharded.losses.begin(), sharded.losses.end());
    }
    std::reverse(jobs.begin(), jobs.end());
  }
  return rounds;
}

/// Returns "" if all sides have the same losses, else a sentence with the first difference.
/// A step changes the loss by about 30 times the tolerance.
std::string loss_difference(const std::map<std::string, Rounds>& rounds, int num_ranks) {
  constexpr double kTolerance = 1e-5;
  if (rounds.empty()) {
    return "none could start";
  }
  const auto& [first, expected] = *rounds.begin();
  for (const auto& [kind, each] : rounds) {
    const auto& x = each.losses;
    const auto& y = expected.losses;
    if (x.size() != y.size() || x.size() != 2 * kFirstSteps * static_cast<size_t>(num_ranks)) {
      return c10::str(kind, " has ", x.size(), " losses, ", first, " ", y.size());
    }
    for (size_t i = 0; i < x.size(); ++i) {
      if (!(std::abs(x[i] - y[i]) <= kTolerance * std::abs(y[i]))) { // true for NaN too
        const auto rank = i / kFirstSteps % static_cast<size_t>(num_ranks);
        return c10::str(
            "step ", i % kFirstSteps, " of rank ", rank, ", ",
            i < x.size() / 2 ? "plain" : "sharded", ": ", kind, " has loss ", x[i], ", ", first,
            " ", y[i]);
      }
    }
  }
  return "";
}

/// tokens/s of ours over gloo / those of Python; empty if one of the two could not start.
std::optional<Figure> ratio_of(const std::map<std::string, Rounds>& rounds) {
  if (!rounds.contains("gloo") || !rounds.contains("python")) {
    return std::nullopt;
  }
  std::vector<double> ratios;
  for (size_t i = 0; i < rounds.at("gloo").sharded.size(); ++i) {
    ratios.push_back(rounds.at("python").sharded[i] / rounds.at("gloo").sharded[i]);
  }
  return Figure(ratios);
}

void print(const Options& options, int num_ranks, const std::map<std::string, Rounds>& rounds) {
  printf("%d ranks\n", num_ranks);
  printf(
      "  %-10s %10s %21s %10s %12s %12s\n", "", "ms / step", "[quartiles]", "tokens/s", "plain, ms",
      "exposed, ms");
  for (const auto& [kind, each] : rounds) {
    const Figure step(each.sharded);
    printf(
        "  %-10s %10.2f   [%8.2f, %8.2f] %10.0f %12.2f %12.2f\n", kind.c_str(), step.median * 1e3,
        step.low * 1e3, step.high * 1e3, options.tokens(num_ranks) / step.median,
        median(each.plain) * 1e3, median(each.exposed()) * 1e3);
  }
  if (loss_difference(rounds, num_ranks).empty()) {
    printf("  losses of the first %d steps agree, plain and sharded, on all ranks\n", kFirstSteps);
  }
  if (const auto ratio = ratio_of(rounds)) {
    printf(
        "  gloo against python, tokens/s: %.2f   [%.2f, %.2f]\n", ratio->median, ratio->low,
        ratio->high);
  }
  fflush(stdout);
}

json to_json(const Options& options, int num_ranks, const std::map<std::string, Rounds>& rounds) {
  json out{{"ranks", num_ranks}, {"losses_agree", loss_difference(rounds, num_ranks).empty()}};
  for (const auto& [kind, each] : rounds) {
    out[kind] = {
        {"seconds_per_step", Figure(each.sharded).to_json()},
        {"tokens_per_second", options.tokens(num_ranks) / median(each.sharded)},
        {"plain_seconds_per_step", Figure(each.plain).to_json()},
        {"exposed_seconds_per_step", Figure(each.exposed()).to_json()},
        {"first_losses", each.losses}};
  }
  if (const auto ratio = ratio_of(rounds)) {
    out["ratio"] = ratio->to_json();
  }
  return out;
}

int run(int argc, char** argv) {
  CLI::App app("Training steps with real communication: ours and Python FSDP2's, in one run.");
  Options options;
  Worker worker;
  std::optional<double> min_ratio;
  bool as_json = false;
  app.add_option("--dim", options.model.dim, "Width, a multiple of 4 heads")->capture_default_str();
  app.add_option("--layers", options.model.layers, "Blocks")->capture_default_str();
  app.add_option("--batch", options.batch, "Sequences, of a rank")->capture_default_str();
  app.add_option("--sequence", options.sequence, "Tokens of a sequence")->capture_default_str();
  app.add_option("--ranks", options.ranks, "Numbers of ranks")->capture_default_str();
  app.add_option("--rounds", options.rounds, "Rounds, of which the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--steps", options.steps, "Steps of each form in a round")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--python", options.python, "An interpreter with torch")->capture_default_str();
  app.add_option(
      "--min-ratio", min_ratio,
      "Exit 1 if ours over gloo has less tokens/s than this many times Python's");
  app.add_flag("--json", as_json, "One JSON object instead of the table");
  // Options for the child processes.
  app.add_option("--worker", worker.kind)->group("");
  app.add_option("--rank", worker.rank)->group("");
  app.add_option("--world-size", worker.num_ranks)->group("");
  app.add_option("--port", worker.port)->group("");
  CLI11_PARSE(app, argc, argv);
  if (worker.kind == "gloo") {
    work_over_gloo(options, worker);
    return 0;
  }
  if (worker.kind == "threads") {
    work_in_threads(options, worker);
    return 0;
  }
  if (!as_json) {
    printf(
        "dim %ld, %ld layers, %ld x %ld tokens per rank, AdamW, one thread per rank\n",
        options.model.dim, options.model.layers, options.batch, options.sequence);
  }
  auto out = json::array();
  bool good = true;
  for (const int num_ranks : options.ranks) {
    const auto rounds = measure(options, num_ranks);
    if (as_json) {
      out.push_back(to_json(options, num_ranks, rounds));
    } else {
      print(options, num_ranks, rounds);
    }
    const auto ratio = ratio_of(rounds);
    good = good && (!min_ratio || (ratio && ratio->median >= *min_ratio));
    if (const auto difference = loss_difference(rounds, num_ranks); !difference.empty()) {
      good = false;
      fprintf(stderr, "FAIL: the sides do not train alike: %s\n", difference.c_str());
    }
  }
  if (as_json) {
    std::cout << out << std::endl;
  }
  return good ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
  return bench::bench_main("step", run, argc, argv);
}
