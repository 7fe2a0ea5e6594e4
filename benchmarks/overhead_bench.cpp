// `./fsdp bench overhead`: what sharding costs on the host, ours next to Python FSDP2's,
// in one run. The same transformer in four forms, which take turns in every round:
//
//   a  plain C++      b  C++ with fsdp::fully_shard, over the `fake` backend
//   c  plain Python   d  Python with FSDP2's fully_shard, over torch's fake process group
//
// so (b - a) / groups is our host time per group and step, (d - c) / groups Python's.
// Fake groups only copy memory, and what that takes is measured alone and shown. A form's
// time in one round is the median of its steps, the figure shown the median of the rounds.
// Differences and ratios are taken within a round first. A sharded optimizer updates
// fewer elements, so its part of the cost may be negative: hence also the ratio without. Before
// anything is timed, both sides are compared: parameters, groups, loss, gradients, collectives.
#include <ATen/record_function.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <fsdp/fsdp.h>
#if __has_include(<fsdp/debug.h>)
#include <fsdp/debug.h>
#define HAS_COMM_DEBUG 1
#endif
#if __has_include(<fsdp/optim.h>)
#include <fsdp/optim.h>
#define HAS_OPTIMIZER 1
#endif

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <map>
#include <optional>
#include <sstream>

#include "line_process.h"
#include "statistics.h"
#include "transformer.h"

namespace {

using bench::by_round;
using bench::Figure;
using bench::median;
using nlohmann::json;

/// Seconds by the wall clock, or of this process on a processor (--clock cpu).
double now(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

constexpr int kFakeRepeats = 200;

struct Options {
  bench::TransformerOptions model;
  int64_t sequence = 16;
  int world_size = 8;
  int rounds = 11;
  int steps = 20;
#ifdef HAS_OPTIMIZER
  std::string optimizer = "adamw";
#else
  std::string optimizer = "none";
#endif
  std::string clock = "wall";
  std::string python = FSDP_BENCH_PYTHON;
  std::string script = FSDP_BENCH_DIR "/overhead.py";

  clockid_t clock_id() const {
    return clock == "cpu" ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
  }
};

json json_of(const Figure& figure) {
  return {{"median", figure.median}, {"low", figure.low}, {"high", figure.high}};
}

/// The parts of a step that are timed. A new one goes here, in Model::time and in
/// overhead.py.
enum Part { Step, ForwardBackward, Optimizer, kParts };
constexpr const char* kPartNames[] = {"step", "forward_backward", "optimizer"};

/// Seconds per step, of each part.
using Times = std::array<double, kParts>;

// ------------------------------------------------------------ The C++ side

/// What one step computed and communicated.
struct Checked {
  double loss = 0;
  double grad_norm = 0; // of this rank's shards
  std::optional<int64_t> all_gathers;
  std::optional<int64_t> reduce_scatters;
};

class Model {
 public:
  Model(const Options& options, bool sharded) : net_(options.model), clock_(options.clock_id()) {
    bench::fill_parameters(*net_);
    for (const auto& item : net_->named_parameters()) {
      shapes_[item.key()] = item.value().sizes().vec();
    }
    if (sharded) {
      const auto mesh = fsdp::init_device_mesh(torch::kCPU, {options.world_size}, {"dp"});
      for (auto& block : net_->blocks) {
        fsdp::fully_shard(block, {.mesh = mesh, .reshard_after_forward = true});
      }
      fsdp::fully_shard(net_, {.mesh = mesh, .reshard_after_forward = true});
    }
    parameters_ = net_->parameters();
    if (options.optimizer == "adamw") {
#ifdef HAS_OPTIMIZER
      optimizer_ = std::make_unique<fsdp::optim::AdamW>(parameters_, kLearningRate);
#else
      TORCH_CHECK(false, "this build has no fsdp::optim::AdamW; use --optimizer none");
#endif
    }
    const auto position = torch::arange(options.sequence);
    tokens_ = (position * 7).remainder(options.model.vocabulary).view({1, -1});
    targets_ = (position * 11).remainder(options.model.vocabulary);
  }

  torch::Tensor forward_backward() {
    const auto logits = net_(tokens_);
    auto loss = torch::cross_entropy_loss(logits.view({-1, logits.size(-1)}), targets_);
    loss.backward();
    return loss;
  }

  /// The optimizer's step, and an end to the gradients.
  void finish() {
    if (optimizer_) {
      optimizer_->step();
      optimizer_->zero_grad();
    } else {
      for (auto& parameter : parameters_) {
        parameter.mutable_grad() = torch::Tensor();
      }
    }
  }

  void step() {
    forward_backward();
    finish();
  }

  /// Median over the steps; one more, before them, warms up.
  Times time(int steps) {
    std::array<std::vector<double>, kParts> times;
    step();
    for (int i = 0; i < steps; ++i) {
      const auto start = now(clock_);
      forward_backward();
      const auto middle = now(clock_);
      finish();
      const auto end = now(clock_);
      times[Step].push_back(end - start);
      times[ForwardBackward].push_back(middle - start);
      times[Optimizer].push_back(end - middle);
    }
    Times result;
    for (int part = 0; part < kParts; ++part) {
      result[part] = median(times[part]);
    }
    return result;
  }

  Checked check() {
    Checked result;
    {
#ifdef HAS_COMM_DEBUG
      fsdp::CommDebugMode comm;
#endif
      result.loss = forward_backward().item<double>();
#ifdef HAS_COMM_DEBUG
      result.all_gathers = comm.count("all_gather");
      result.reduce_scatters = comm.count("reduce_scatter");
#endif
    }
    double square = 0;
    for (const auto& parameter : parameters_) {
      square += parameter.grad().to(torch::kDouble).square().sum().item<double>();
    }
    result.grad_norm = std::sqrt(square);
    finish();
    return result;
  }

  int64_t groups() const {
    const auto modules = net_->modules();
    return std::count_if(modules.begin(), modules.end(), [](const auto& module) {
      return fsdp::is_fsdp_module(*module);
    });
  }
  /// Of the whole parameters.
  const std::map<std::string, std::vector<int64_t>>& shapes() const {
    return shapes_;
  }
  /// Elements of one rank's shard of a block, padding included.
  int64_t block_shard_numel(int64_t world_size) const {
    int64_t numel = 0;
    for (const auto& [name, sizes] : shapes_) {
      if (name.starts_with("block0.")) {
        const auto rows = (sizes[0] + world_size - 1) / world_size;
        numel += rows * c10::multiply_integers(sizes) / sizes[0];
      }
    }
    return numel;
  }

 private:
  static constexpr double kLearningRate = 1e-5; // nothing becomes small or large

  bench::Transformer net_;
  const clockid_t clock_;
  std::map<std::string, std::vector<int64_t>> shapes_;
  std::vector<torch::Tensor> parameters_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  torch::Tensor tokens_;
  torch::Tensor targets_;
};

// ------------------------------------------------------------ The Python side

/// overhead.py in a child, which works only while it is asked.
class Python {
 public:
  explicit Python(const Options& options) : child_(words_of(options)) {
    if (const auto line = child_.read_line()) {
      hello_ = json::parse(*line);
    }
  }

  /// Why there is nothing to compare with; empty if there is.
  std::string missing() const {
    if (hello_.is_null()) {
      return "it could not start";
    }
    return hello_["no_fsdp"].is_null() ? ""
                                       : "no fully_shard: " + hello_["no_fsdp"].get<std::string>();
  }
  const json& hello() const {
    return hello_;
  }
  json check() {
    return json::parse(child_.ask("check"));
  }
  double time_fake_group(int64_t shard_numel, int repeats) {
    return std::stod(child_.ask(c10::str("fake ", shard_numel, " ", repeats)));
  }
  Times time(const char* model, int steps) {
    std::istringstream answer(child_.ask(c10::str(model, " ", steps)));
    Times times;
    for (auto& seconds : times) {
      answer >> seconds;
    }
    TORCH_CHECK(answer, "the Python side answered '", answer.str(), "'");
    return times;
  }

 private:
  static std::vector<std::string> words_of(const Options& options) {
    std::vector<std::string> words{options.python, options.script};
    const auto add = [&](const char* name, const auto& value) {
      words.push_back(std::string("--") + name);
      words.push_back(c10::str(value));
    };
    add("dim", options.model.dim);
    add("layers", options.model.layers);
    add("heads", options.model.heads);
    add("vocabulary", options.model.vocabulary);
    add("sequence", options.sequence);
    add("world-size", options.world_size);
    add("optimizer", options.optimizer);
    add("clock", options.clock);
    return words;
  }

  bench::LineProcess child_;
  json hello_;
};

// ------------------------------------------------------------ Is it honest?

bool close_to(double x, double y) {
  return std::abs(x - y) <= 1e-4 * std::max(std::abs(x), std::abs(y));
}

/// Throws where the four forms are not what they are said to be. Returns sentences.
std::vector<std::string> check_all(Model& plain, Model& sharded, Python* python) {
  std::vector<std::string> said;
  const auto groups = sharded.groups();
  const auto a = plain.check();
  const auto b = sharded.check();
  const auto compare_counts = [&](const char* whose, int64_t gathers, int64_t reductions) {
    TORCH_CHECK(
        gathers == 2 * groups && reductions == groups, whose, " side ran ", gathers,
        " all-gathers and ", reductions, " reduce-scatters in a step of ", groups, " groups");
    said.push_back(c10::str(whose, " side ran 2 all-gathers and 1 reduce-scatter per group"));
  };
  if (b.all_gathers) {
    compare_counts("the C++", *b.all_gathers, *b.reduce_scatters);
  } else {
    said.push_back("our collectives were not counted: this build has no <fsdp/debug.h>");
  }
  if (!python) {
    return said;
  }
  TORCH_CHECK(
      python->hello()["parameters"] == json(plain.shapes()) && plain.shapes() == sharded.shapes(),
      "the sides have different parameters");
  TORCH_CHECK(
      python->hello()["groups"] == groups, "Python has ", python->hello()["groups"].dump(),
      " groups, C++ ", groups);
  said.push_back("same parameters by name and shape, same groups");
  const auto answer = python->check();
  compare_counts(
      "the Python", answer["fsdp"]["all_gathers"].get<int64_t>(),
      answer["fsdp"]["reduce_scatters"].get<int64_t>());
  const auto compare = [&](const char* what, const Checked& ours, const json& theirs) {
    const auto loss = theirs["loss"].get<double>();
    const auto norm = theirs["grad_norm"].get<double>();
    TORCH_CHECK(
        close_to(ours.loss, loss) && close_to(ours.grad_norm, norm), what, ": C++ has loss ",
        ours.loss, " and gradient norm ", ours.grad_norm, ", Python ", loss, " and ", norm);
    said.push_back(c10::str(
        what, " agree on loss (", ours.loss, ") and gradients (norm ", ours.grad_norm, ")"));
  };
  compare("a and c", a, answer["plain"]);
  compare("b and d", b, answer["fsdp"]); // both fake groups repeat rank 0's shard
  return said;
}

// ------------------------------------------------------------ The fake groups alone

/// Seconds that our fake group takes for a block's collectives in one step, below all
/// that is ours to make fast. overhead.py has the same for torch's.
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

// ------------------------------------------------------------ Rounds and report

/// By form (a, b, c, d), then part: the rounds.
using Rounds = std::map<char, std::array<std::vector<double>, kParts>>;

Rounds measure(const Options& options, Model& plain, Model& sharded, Python* python) {
  Rounds rounds;
  for (int round = 0; round < options.rounds; ++round) {
    std::string order = python ? "abcd" : "ab";
    if (round % 2 == 1) {
      std::reverse(order.begin(), order.end());
    }
    for (const char form : order) {
      const auto times = form == 'a'   ? plain.time(options.steps)
                         : form == 'b' ? sharded.time(options.steps)
                         : form == 'c' ? python->time("plain", options.steps)
                                       : python->time("fsdp", options.steps);
      for (int part = 0; part < kParts; ++part) {
        rounds[form][part].push_back(times[part]);
      }
    }
  }
  return rounds;
}

class Report {
 public:
  Report(const Options& options, Rounds rounds, int64_t groups, double ours_fake, double torch_fake)
      : options_(options),
        rounds_(std::move(rounds)),
        groups_(static_cast<double>(groups)),
        ours_fake_(ours_fake),
        torch_fake_(torch_fake),
        has_python_(rounds_.contains('c')) {}

  Figure time(char form, Part part) const {
    return Figure(rounds_.at(form)[part]);
  }
  /// Seconds per group and step that `sharded` takes more than `plain`.
  std::vector<double> cost(char sharded, char plain, Part part) const {
    return by_round(options_.rounds, [&](size_t i) {
      return (rounds_.at(sharded)[part][i] - rounds_.at(plain)[part][i]) / groups_;
    });
  }
  Figure cost_ratio(Part part, double less_theirs = 0, double less_ours = 0) const {
    const auto theirs = cost('d', 'c', part);
    const auto ours = cost('b', 'a', part);
    return Figure(by_round(options_.rounds, [&](size_t i) {
      return (theirs[i] - less_theirs) / (ours[i] - less_ours);
    }));
  }
  Figure step_ratio() const {
    return Figure(by_round(options_.rounds, [&](size_t i) {
      return rounds_.at('d')[Step][i] / rounds_.at('b')[Step][i];
    }));
  }
  /// Without what the fake groups take by themselves, which differ.
  Figure cost_ratio_without_fake() const {
    return cost_ratio(Step, torch_fake_, ours_fake_);
  }

  json to_json() const {
    json out;
    for (const auto& [form, parts] : rounds_) {
      for (int part = 0; part < kParts; ++part) {
        out["seconds_per_step"][std::string(1, form)][kPartNames[part]] =
            json_of(Figure(parts[part]));
      }
    }
    for (int part = 0; part < kParts; ++part) {
      const auto p = static_cast<Part>(part);
      auto& cost_out = out["seconds_per_group_and_step"];
      cost_out["ours"][kPartNames[part]] = json_of(Figure(cost('b', 'a', p)));
      if (has_python_) {
        cost_out["python"][kPartNames[part]] = json_of(Figure(cost('d', 'c', p)));
      }
    }
    out["fake_group_seconds_per_group_and_step"] = {{"ours", ours_fake_}, {"torch", torch_fake_}};
    if (has_python_) {
      out["cost_ratio"] = json_of(cost_ratio(Step));
      out["cost_ratio_forward_backward"] = json_of(cost_ratio(ForwardBackward));
      out["cost_ratio_without_fake_groups"] = json_of(cost_ratio_without_fake());
      out["step_ratio"] = json_of(step_ratio());
    }
    return out;
  }

  void print() const {
    const bool has_optimizer = options_.optimizer != "none";
    printf("%-22s %9s %19s", "ms per step", "median", "[quartiles]");
    printf("%19s %12s\n", "forward, backward", has_optimizer ? "optimizer" : "zero_grad");
    const std::pair<char, const char*> names[] = {
        {'a', "a  C++"}, {'b', "b  C++ fully_shard"}, {'c', "c  Python"}, {'d', "d  Python FSDP2"}};
    for (const auto& [form, name] : names) {
      if (!rounds_.contains(form)) {
        continue;
      }
      const auto step = time(form, Step);
      printf(
          "%-22s %9.3f   [%7.3f, %7.3f]", name, step.median * 1e3, step.low * 1e3, step.high * 1e3);
      printf(
          " %18.3f %12.3f\n", time(form, ForwardBackward).median * 1e3,
          time(form, Optimizer).median * 1e3);
    }
    printf("\n%-22s\n", "us per group and step");
    print_cost("(b - a) / groups", 'b', 'a', ours_fake_);
    if (!has_python_) {
      return;
    }
    print_cost("(d - c) / groups", 'd', 'c', torch_fake_);
    printf("\n%-22s\n", "ratio");
    print_ratio("(d - c) / (b - a)", cost_ratio(Step));
    if (has_optimizer) {
      print_ratio("  forward, backward", cost_ratio(ForwardBackward));
    }
    print_ratio("  without fake groups", cost_ratio_without_fake());
    print_ratio("d / b", step_ratio());
  }

 private:
  void print_cost(const char* name, char sharded, char plain, double fake) const {
    const Figure step(cost(sharded, plain, Step));
    printf(
        "%-22s %9.1f   [%7.1f, %7.1f]", name, step.median * 1e6, step.low * 1e6, step.high * 1e6);
    printf(
        " %18.1f %12.1f   of which the fake group itself %.1f\n",
        Figure(cost(sharded, plain, ForwardBackward)).median * 1e6,
        Figure(cost(sharded, plain, Optimizer)).median * 1e6, fake * 1e6);
  }
  static void print_ratio(const char* name, const Figure& figure) {
    printf("%-22s %9.2f   [%7.2f, %7.2f]\n", name, figure.median, figure.low, figure.high);
  }

  const Options options_;
  const Rounds rounds_;
  const double groups_;
  const double ours_fake_;
  const double torch_fake_;
  const bool has_python_;
};

int run(int argc, char** argv) {
  CLI::App app("What sharding costs on the host: ours and Python FSDP2's, in one run.");
  Options options;
  std::optional<double> min_ratio;
  bool as_json = false;
  bool only_check = false;
  bool operators = false;
  int sharded_steps = 0;
  app.add_option("--dim", options.model.dim, "Width, a multiple of 4 heads")->capture_default_str();
  app.add_option("--layers", options.model.layers, "Blocks")->capture_default_str();
  app.add_option("--sequence", options.sequence, "Tokens, in a batch of 1")->capture_default_str();
  app.add_option("--world-size", options.world_size, "Ranks of the fake groups")
      ->check(CLI::Range(2, 1 << 20))
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
  app.add_option("--min-ratio", min_ratio, "Exit 1 if (d - c) / (b - a) is below");
  app.add_flag("--json", as_json, "One JSON object instead of the table");
  app.add_flag("--check", only_check, "Compare the sides, say what was found, and time nothing");
  app.add_flag("--operators", operators, "List the ATen operators that sharding adds; no times");
  app.add_option(
      "--sharded-steps", sharded_steps, "Run that many sharded steps alone, for a profiler");
  CLI11_PARSE(app, argc, argv);

  std::unique_ptr<Python> python;
  if (!operators && sharded_steps == 0) {
    python = std::make_unique<Python>(options); // before any thread of ours
    if (const auto reason = python->missing(); !reason.empty()) {
      fprintf(stderr, "no Python side (%s): %s\n", options.python.c_str(), reason.c_str());
      python.reset();
    }
  }
  torch::set_num_threads(1);
  fsdp::init_process_group({.backend = "fake", .rank = 0, .world_size = options.world_size});
  Model plain(options, /*sharded=*/false);
  Model sharded(options, /*sharded=*/true);
  if (operators) {
    print_operators(plain, sharded);
    return 0;
  }
  if (sharded_steps > 0) {
    for (int i = 0; i < sharded_steps; ++i) {
      sharded.step();
    }
    return 0;
  }

  const auto said = check_all(plain, sharded, python.get());
  const auto groups = sharded.groups();
  if (!as_json) {
    printf(
        "dim %ld, %ld layers, sequence %ld, world size %d: %ld groups, %zu parameters, "
        "optimizer %s, one thread, %s clock\n",
        options.model.dim, options.model.layers, options.sequence, options.world_size, groups,
        sharded.shapes().size(), options.optimizer.c_str(), options.clock.c_str());
    for (const auto& sentence : said) {
      printf("checked: %s\n", sentence.c_str());
    }
    printf("\n");
    fflush(stdout);
  }
  if (only_check) {
    return python ? 0 : 1;
  }
  auto rounds = measure(options, plain, sharded, python.get());
  const auto shard_numel = sharded.block_shard_numel(options.world_size);
  const auto ours_fake = time_fake_group(shard_numel, kFakeRepeats, options.clock_id());
  const auto torch_fake = python ? python->time_fake_group(shard_numel, kFakeRepeats) : 0;
  const Report report(options, std::move(rounds), groups, ours_fake, torch_fake);
  if (as_json) {
    auto out = report.to_json();
    out["options"] = {
        {"dim", options.model.dim},
        {"layers", options.model.layers},
        {"sequence", options.sequence},
        {"world_size", options.world_size},
        {"rounds", options.rounds},
        {"steps", options.steps},
        {"optimizer", options.optimizer},
        {"clock", options.clock},
        {"groups", groups},
        {"torch", python ? python->hello()["torch"] : json()}};
    out["checked"] = said;
    std::cout << out << std::endl;
  } else {
    report.print();
  }
  if (!min_ratio) {
    return 0;
  }
  return python && report.cost_ratio(Step).median >= *min_ratio ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const c10::Error& error) {
    fprintf(stderr, "overhead: %s\n", error.what_without_backtrace());
    return 2;
  }
}
