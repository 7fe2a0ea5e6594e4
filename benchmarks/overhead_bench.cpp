// `./fsdp bench overhead` compares the host cost of our sharding with Python FSDP2's in
// one run. The same transformer has four forms, which take turns in every round:
//
//   a  plain C++      b  C++ with fsdp::fully_shard, over the `fake` backend
//   c  plain Python   d  Python with FSDP2's fully_shard, over torch's fake process group
//
// With --min-shard-numel there is a fifth form, e: like b, but parameters with fewer elements
// stay whole on every rank.
//
// So (b - a) / groups is our host time per group and step, and (d - c) / groups Python's.
// Fake groups only copy memory; the time of that is measured alone and shown. A form's time in
// one round is the median of its steps, and the figure shown is the median of the rounds.
// Differences and ratios are taken within a round first. A sharded optimizer updates fewer
// elements, so its part of the cost may be negative; so the ratio without the optimizer is shown
// too. Before anything is timed, both sides are compared: parameters, groups, loss, gradients,
// collectives.
//
// `--sweep` does all this for several sizes, each in a process of its own.
#include <ATen/record_function.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <map>
#include <optional>

#include "bench_main.h"
#include "overhead_model.h"
#include "overhead_phases.h"
#include "overhead_python.h"
#include "overhead_report.h"

namespace {

using namespace bench;
using nlohmann::json;

constexpr int kFakeRepeats = 200;

// ------------------------------------------------------------ Is it honest?

bool close_to(double x, double y, double tolerance) {
  return std::abs(x - y) <= tolerance * std::max(std::abs(x), std::abs(y));
}

/// Throws if C++ and Python differ in parameters, groups, loss, gradients or collectives.
/// Returns sentences that say what was checked.
std::vector<std::string> check_all(
    const Options& options, Model& plain, Model& sharded, Python* python) {
  const double tolerance = options.is_bf16() ? 1e-2 : 1e-4;
  std::vector<std::string> findings;
  const auto groups = sharded.groups();
  const auto a = plain.check();
  const auto b = sharded.check();
  const auto compare_counts = [&](const char* whose, int64_t gathers, int64_t reductions) {
    TORCH_CHECK(
        gathers == 2 * groups && reductions == groups, whose, " side ran ", gathers,
        " all-gathers and ", reductions, " reduce-scatters in a step of ", groups, " groups");
    findings.push_back(c10::str(whose, " side ran 2 all-gathers and 1 reduce-scatter per group"));
  };
  compare_counts("the C++", b.all_gathers, b.reduce_scatters);
  if (!python) {
    return findings;
  }
  TORCH_CHECK(
      python->hello()["parameters"] == json(plain.shapes()) && plain.shapes() == sharded.shapes(),
      "the sides have different parameters");
  TORCH_CHECK(
      python->hello()["groups"] == groups, "Python has ", python->hello()["groups"].dump(),
      " groups, C++ ", groups);
  findings.push_back("same parameters by name and shape, same groups");
  const auto answer = python->check();
  compare_counts(
      "the Python", answer["fsdp"]["all_gathers"].get<int64_t>(),
      answer["fsdp"]["reduce_scatters"].get<int64_t>());
  const auto compare = [&](const char* what, const Checked& ours, const json& theirs) {
    const auto loss = theirs["loss"].get<double>();
    const auto norm = theirs["grad_norm"].get<double>();
    TORCH_CHECK(
        close_to(ours.loss, loss, tolerance) && close_to(ours.grad_norm, norm, tolerance), what,
        ": C++ has loss ", ours.loss, " and gradient norm ", ours.grad_norm, ", Python ", loss,
        " and ", norm);
    findings.push_back(c10::str(
        what, " agree on loss (", ours.loss, ") and gradients (norm ", ours.grad_norm, ")"));
  };
  compare("a and c", a, answer["plain"]);
  compare("b and d", b, answer["fsdp"]); // comparable, as both fake groups repeat rank 0's shard
  return findings;
}

std::string check_partly(Model& partly) {
  const auto e = partly.check();
  TORCH_CHECK(e.all_reduces > 0, "no parameter is below --min-shard-numel: e is b");
  return c10::str(
      "e ran ", e.all_gathers, " all-gathers, ", e.reduce_scatters, " reduce-scatters and ",
      e.all_reduces, " all-reduces in a step of ", partly.groups(), " modules");
}

// ------------------------------------------------------------ The fake groups alone

/// Seconds that our fake group alone takes for a block's collectives in one step. This
/// part of the cost is not the engine's. overhead.py measures the same of torch's fake group.
double time_fake_group(int64_t shard_numel, int repeats, clockid_t clock) {
  auto& backend = *fsdp::default_group().backend();
  auto large = torch::zeros({shard_numel * backend.getSize()});
  auto small = torch::zeros({shard_numel});
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    const auto start = now(clock);
    backend._allgather_base(large, small)->wait();
    backend._allgather_base(large, small)->wait();
    backend._reduce_scatter_base(small, large)->wait();
    times.push_back(now(clock) - start);
  }
  return median(times);
}

// ------------------------------------------------------------ Operators

/// Counts of the ATen operators that `body` calls.
template <class Body>
std::map<std::string, int64_t> count_operators(Body body) {
  static thread_local std::map<std::string, int64_t>* counts = nullptr;
  std::map<std::string, int64_t> result;
  counts = &result;
  const auto handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& fn) {
                                   ++(*counts)[fn.name()];
                                   return std::unique_ptr<at::ObserverContext>();
                                 }).scopes({at::RecordScope::FUNCTION}));
  body();
  at::removeCallback(handle);
  return result;
}

void print_operators(Model& plain, Model& sharded) {
  plain.step();
  sharded.step();
  auto counts = count_operators([&] { sharded.step(); });
  for (const auto& [name, count] : count_operators([&] { plain.step(); })) {
    counts[name] -= count;
  }
  std::vector<std::pair<int64_t, std::string>> sorted;
  int64_t total = 0;
  for (const auto& [name, count] : counts) {
    if (count != 0) {
      sorted.emplace_back(count, name);
      total += count;
    }
  }
  std::sort(sorted.rbegin(), sorted.rend());
  const auto groups = static_cast<double>(sharded.groups());
  printf("operators that sharding adds, per group and step: %.1f\n", total / groups);
  for (const auto& [count, name] : sorted) {
    printf("%8.2f  %s\n", count / groups, name.c_str());
  }
}

// ------------------------------------------------------------ Rounds

/// The forms in this process: a, b, and e with --min-shard-numel.
struct Ours {
  explicit Ours(const Options& options)
      : plain(options, Sharding::None), sharded(options, Sharding::Full) {
    if (options.min_shard_numel > 0) {
      partly.emplace(options, Sharding::LargeOnly);
    }
  }

  Model plain;
  Model sharded;
  std::optional<Model> partly;
};

Measured measure(const Options& options, Ours& ours, Python* python) {
  Measured result{.groups = ours.sharded.groups()};
  for (int round = 0; round < options.rounds; ++round) {
    std::string order = ours.partly ? "abe" : "ab";
    order += python ? "cd" : "";
    if (round % 2 == 1) {
      std::reverse(order.begin(), order.end());
    }
    for (const char form : order) {
      const auto times = form == 'a'   ? ours.plain.time(options.steps)
                         : form == 'b' ? ours.sharded.time(options.steps)
                         : form == 'e' ? ours.partly->time(options.steps)
                         : form == 'c' ? python->time("plain", options.steps)
                                       : python->time("fsdp", options.steps);
      for (int part = 0; part < kParts; ++part) {
        result.rounds[form][part].push_back(times[part]);
      }
    }
  }
  result.phases['b'] = time_phases(ours.sharded, options.steps, options.clock_id());
  if (ours.partly) {
    result.phases['e'] = time_phases(*ours.partly, options.steps, options.clock_id());
  }
  const auto shard_numel = ours.sharded.block_shard_numel(options.world_size);
  result.ours_fake = time_fake_group(shard_numel, kFakeRepeats, options.clock_id());
  if (python) {
    result.phases['d'] = python->time_phases(options.steps);
    result.torch_fake = python->time_fake_group(shard_numel, kFakeRepeats);
  }
  return result;
}

// ------------------------------------------------------------ Sizes

/// Runs one size in a process of its own and returns its report.
json run_size(const std::string& command) {
  FILE* pipe = popen(command.c_str(), "r");
  TORCH_CHECK(pipe, "cannot run ", command);
  std::string text;
  for (int c = fgetc(pipe); c != EOF; c = fgetc(pipe)) {
    text.push_back(static_cast<char>(c));
  }
  TORCH_CHECK(pclose(pipe) == 0, command, " failed");
  return json::parse(text);
}

/// Measures all sizes of interest with `program`. Returns true if every cost ratio is at
/// least `min_ratio`.
bool sweep(const std::string& program, const Options& options, double min_ratio) {
  struct Size {
    const char* what;
    const char* words;
    int longer = 1; // about how many times longer a step takes than one of the first size
  };
  static constexpr Size kSizes[] = {
      {"default", ""},
      {"bf16 parameters", "--dtype bf16", 2},
      {"1 parameter per group", "--params-per-group 1"},
      {"40 parameters per group", "--params-per-group 40", 3},
      {"4 + 1 groups", "--layers 4"},
      {"64 + 1 groups", "--layers 64", 4},
      {"128 + 1 groups", "--layers 128", 8},
      {"64 ranks", "--world-size 64"},
      {"1,024 ranks", "--world-size 1024", 4}};
  printf("%-26s %16s %16s %8s %8s\n", "us per group and step", "ours", "Python", "ratio", "d / b");
  bool enough = true;
  for (const auto& [what, words, longer] : kSizes) {
    const int steps = std::max(options.steps / longer, std::min(options.steps, 3));
    const auto out = run_size(c10::str(
        program, " --json --rounds ", options.rounds, " --steps ", steps, " --clock ",
        options.clock, " --optimizer ", options.optimizer, " --python ", options.python, " ",
        words));
    const auto& costs = out["seconds_per_group_and_step"];
    const auto us = [&](const char* who) {
      return costs.contains(who) ? costs[who]["step"]["median"].get<double>() * 1e6 : 0;
    };
    const auto ratio = [&](const char* name) {
      return out.contains(name) ? out[name]["median"].get<double>() : 0;
    };
    enough = enough && ratio("cost_ratio") >= min_ratio;
    printf(
        "%-26s %16.1f %16.1f %8.2f %8.2f\n", what, us("ours"), us("python"), ratio("cost_ratio"),
        ratio("step_ratio"));
    fflush(stdout);
  }
  return enough;
}

// ------------------------------------------------------------ The command

json describe(const Options& options, int64_t groups) {
  return {
      {"dim", options.model.dim},
      {"layers", options.model.layers},
      {"params_per_group", options.model.params_per_block},
      {"sequence", options.sequence},
      {"world_size", options.world_size},
      {"dtype", options.dtype},
      {"min_shard_numel", options.min_shard_numel},
      {"rounds", options.rounds},
      {"steps", options.steps},
      {"optimizer", options.optimizer},
      {"clock", options.clock},
      {"groups", groups}};
}

/// What the program is to do. `Options` say how.
struct Task {
  std::optional<double> min_ratio;
  bool as_json = false;
  bool only_check = false;
  bool operators = false;
  bool sweep = false;
  int sharded_steps = 0;
  int plain_steps = 0;
};

void add_options(CLI::App& app, Options& options, Task& task) {
  app.add_option("--dim", options.model.dim, "Width, a multiple of 4 heads")->capture_default_str();
  app.add_option("--layers", options.model.layers, "Blocks")->capture_default_str();
  app.add_option("--sequence", options.sequence, "Tokens, in a batch of 1")->capture_default_str();
  app.add_option(
         "--params-per-group", options.model.params_per_block,
         "Of a block: 9 are a transformer's; more, with norms behind it; fewer, linear layers")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--world-size", options.world_size, "Ranks of the fake groups")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  app.add_option(
         "--dtype", options.dtype, "fp32, or bf16: parameters in bf16, gradients reduced in fp32")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
  app.add_option(
         "--min-shard-numel", options.min_shard_numel,
         "Measure ours also with parameters of fewer elements kept whole on every rank")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "Rounds, of which the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--steps", options.steps, "Steps of each form in a round")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--optimizer", options.optimizer, "adamw (fused, on both sides) or none")
      ->check(CLI::IsMember({"adamw", "none"}))
      ->capture_default_str();
  app.add_option(
         "--clock", options.clock,
         "wall, or cpu: time on a processor, for a machine that others use too")
      ->check(CLI::IsMember({"wall", "cpu"}))
      ->capture_default_str();
  app.add_option("--python", options.python, "An interpreter with torch")->capture_default_str();
  app.add_option("--min-ratio", task.min_ratio, "Exit 1 if (d - c) / (b - a) is below");
  app.add_flag("--json", task.as_json, "One JSON object instead of the table");
  app.add_flag(
      "--check", task.only_check, "Compare the sides, say what was found, and time nothing");
  app.add_flag(
      "--operators", task.operators, "List the ATen operators that sharding adds; no times");
  app.add_flag("--sweep", task.sweep, "All sizes of interest instead of one");
  app.add_option(
      "--sharded-steps", task.sharded_steps, "Run so many sharded steps alone, for a profiler");
  app.add_option("--plain-steps", task.plain_steps, "The same without sharding, to compare with");
}

int run(int argc, char** argv) {
  CLI::App app("What sharding costs on the host: ours and Python FSDP2's, in one run.");
  Options options;
  Task task;
  add_options(app, options, task);
  CLI11_PARSE(app, argc, argv);
  if (task.sweep) {
    return sweep(argv[0], options, task.min_ratio.value_or(0)) ? 0 : 1;
  }

  const bool alone = task.operators || task.sharded_steps > 0 || task.plain_steps > 0;
  std::unique_ptr<Python> python;
  if (!alone) {
    python = std::make_unique<Python>(options); // forks, so before this process has threads
    if (const auto reason = python->missing(); !reason.empty()) {
      fprintf(stderr, "no Python side (%s): %s\n", options.python.c_str(), reason.c_str());
      python.reset();
    }
  }
  torch::set_num_threads(1);
  fsdp::init_process_group({.backend = "fake", .rank = 0, .world_size = options.world_size});
  Ours ours(options);
  if (alone) {
    auto& sharded = ours.partly ? *ours.partly : ours.sharded;
    if (task.operators) {
      print_operators(ours.plain, sharded);
    }
    for (int i = 0; i < task.sharded_steps; ++i) {
      sharded.step();
    }
    for (int i = 0; i < task.plain_steps; ++i) {
      ours.plain.step();
    }
    return 0;
  }

  auto findings = check_all(options, ours.plain, ours.sharded, python.get());
  if (ours.partly) {
    findings.push_back(check_partly(*ours.partly));
  }
  const auto groups = ours.sharded.groups();
  if (!task.as_json) {
    printf(
        "dim %ld, %ld layers, sequence %ld, world size %d: %ld groups, %zu parameters, %s, "
        "optimizer %s, one thread, %s clock\n",
        options.model.dim, options.model.layers, options.sequence, options.world_size, groups,
        ours.sharded.shapes().size(), options.dtype.c_str(), options.optimizer.c_str(),
        options.clock.c_str());
    for (const auto& sentence : findings) {
      printf("checked: %s\n", sentence.c_str());
    }
    printf("\n");
    fflush(stdout);
  }
  if (task.only_check) {
    return python ? 0 : 1;
  }
  const Report report(measure(options, ours, python.get()));
  if (task.as_json) {
    auto out = report.to_json();
    out["options"] = describe(options, groups);
    out["torch"] = python ? python->hello()["torch"] : json();
    out["checked"] = findings;
    std::cout << out << std::endl;
  } else {
    report.print();
  }
  if (!task.min_ratio) {
    return 0;
  }
  return python && report.cost_ratio(Step).median >= *task.min_ratio ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
  return bench::bench_main("overhead", run, argc, argv);
}
