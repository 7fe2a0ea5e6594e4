// `./fsdp bench scale`: how the host cost of sharding grows: with groups, with parameters, with
// ranks. Every point is (b - a) of `bench overhead`: steps of a sharded model over a fake group,
// less those of the plain one, interleaved. The first two are of its transformer; a line is
// fitted through them. Ranks are varied on parameters of 1,024 rows, which divide evenly: a
// transformer of width 64 over 1,024 ranks is fifteen parts padding to one of parameters, and
// one would measure memory.
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <iostream>
#include <optional>

#include "bench_main.h"
#include "measure.h"
#include "overhead_model.h"

namespace {

using namespace bench;
using nlohmann::json;

struct Settings {
  int rounds = 7;
  int steps = 10;
  clockid_t clock = CLOCK_MONOTONIC;
};

// ------------------------------------------------------------ Parameters of 1,024 rows

constexpr int64_t kRows = 1024;
constexpr int64_t kColumns = 32;

/// All of its nine parameters are used, as cheaply as can be.
struct StripImpl : torch::nn::Module {
  StripImpl() {
    for (int i = 0; i < 9; ++i) {
      weights.push_back(
          register_parameter("weight" + std::to_string(i), torch::ones({kRows, kColumns})));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& weight : weights) {
      x = x * weight.mean();
    }
    return x;
  }
  std::vector<torch::Tensor> weights;
};
FSDP_MODULE(Strip);

struct StripsImpl : torch::nn::Module {
  explicit StripsImpl(int64_t number) {
    for (int64_t i = 0; i < number; ++i) {
      strips.push_back(register_module("strip" + std::to_string(i), Strip()));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& strip : strips) {
      x = strip(x);
    }
    return x;
  }
  std::vector<Strip> strips;
};
FSDP_MODULE(Strips);

class StripModel {
 public:
  StripModel(int64_t groups, bool sharded, clockid_t clock) : net_(groups), clock_(clock) {
    if (sharded) {
      for (auto& strip : net_->strips) {
        fsdp::fully_shard(strip, {.reshard_after_forward = true});
      }
      fsdp::fully_shard(net_, {.reshard_after_forward = true}); // without parameters: no group
    }
  }

  double time(int steps) {
    step();
    std::vector<double> times;
    for (int i = 0; i < steps; ++i) {
      const auto start = now(clock_);
      step();
      times.push_back(now(clock_) - start);
    }
    return median(times);
  }

 private:
  void step() {
    net_(input_).sum().backward();
    net_->zero_grad();
  }

  Strips net_;
  const clockid_t clock_;
  const torch::Tensor input_ = torch::ones({1, 16}, torch::requires_grad());
};

// ------------------------------------------------------------ Points

/// While it lives, this process is rank 0 of so many.
struct FakeWorld {
  explicit FakeWorld(int size) {
    fsdp::init_process_group({.backend = "fake", .rank = 0, .world_size = size});
  }
  ~FakeWorld() {
    fsdp::destroy_process_group();
  }
  FakeWorld(const FakeWorld&) = delete;
  FakeWorld& operator=(const FakeWorld&) = delete;
};

struct Point {
  double at = 0;     // groups, parameters or ranks
  double groups = 0; // that are in the cost
  Figure cost;       // seconds per step
};

template <class Time>
Figure difference(const Settings& settings, Time plain, Time sharded) {
  std::vector<double> costs;
  for (int round = 0; round < settings.rounds; ++round) {
    const auto before = plain();
    costs.push_back(sharded() - before);
  }
  return Figure(costs);
}

Point transformer_point(const Settings& settings, const TransformerOptions& model, double at) {
  Options options;
  options.model = model;
  options.optimizer = "none";
  options.clock = settings.clock == CLOCK_MONOTONIC ? "wall" : "cpu";
  const FakeWorld world(options.world_size);
  Model plain(options, Sharding::None);
  Model sharded(options, Sharding::Full);
  const auto time = [&](Model& model_of) { return model_of.time(settings.steps)[Step]; };
  const std::function<double()> of_plain = [&] { return time(plain); };
  const std::function<double()> of_sharded = [&] { return time(sharded); };
  return {
      .at = at,
      .groups = static_cast<double>(sharded.groups()),
      .cost = difference(settings, of_plain, of_sharded)};
}

Point rank_point(const Settings& settings, int num_ranks) {
  constexpr int64_t kGroups = 8;
  const FakeWorld world(num_ranks);
  StripModel plain(kGroups, /*sharded=*/false, settings.clock);
  StripModel sharded(kGroups, /*sharded=*/true, settings.clock);
  const std::function<double()> of_plain = [&] { return plain.time(settings.steps); };
  const std::function<double()> of_sharded = [&] { return sharded.time(settings.steps); };
  return {
      .at = static_cast<double>(num_ranks),
      .groups = kGroups,
      .cost = difference(settings, of_plain, of_sharded)};
}

// ------------------------------------------------------------ Report

struct Series {
  const char* what; // that is varied
  std::vector<Point> points;
  bool per_group = true;

  double value(const Point& point) const { // in us
    return point.cost.median * 1e6 / (per_group ? point.groups : 1);
  }
  Line line() const {
    std::vector<double> x, y;
    for (const auto& point : points) {
      x.push_back(point.at);
      y.push_back(value(point));
    }
    return {x, y};
  }
  double growth() const {
    return value(points.back()) / value(points.front());
  }

  void print() const {
    printf("%-12s %14s\n", what, per_group ? "us per group" : "us per step");
    for (const auto& point : points) {
      const double scale = 1e6 / (per_group ? point.groups : 1);
      printf(
          "%12.0f %14.1f   [%9.1f, %9.1f]\n", point.at, value(point), point.cost.low * scale,
          point.cost.high * scale);
    }
    const auto fitted = line();
    printf(
        "  fitted: %.1f + %.4f us each, off by at most %.0f %%; last / first: %.2f\n\n",
        fitted.intercept, fitted.slope, 100 * fitted.worst, growth());
    fflush(stdout);
  }
  json to_json() const {
    json out;
    for (const auto& point : points) {
      out["points"].push_back(
          {{"at", point.at}, {"groups", point.groups}, {"seconds", point.cost.to_json()}});
    }
    const auto fitted = line();
    out["fitted_us"] = {
        {"intercept", fitted.intercept}, {"slope", fitted.slope}, {"worst", fitted.worst}};
    out["growth"] = growth();
    return out;
  }
};

int run(int argc, char** argv) {
  CLI::App app("How the host cost of sharding grows with groups, parameters and ranks.");
  Settings settings;
  std::string clock = "wall";
  std::optional<double> max_growth;
  bool as_json = false;
  app.add_option("--rounds", settings.rounds, "Rounds, of which the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--steps", settings.steps, "Steps of each form in a round")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--clock", clock, "wall, or cpu: time on a processor")
      ->check(CLI::IsMember({"wall", "cpu"}))
      ->capture_default_str();
  app.add_option("--max-growth", max_growth, "Exit 1 if 1,024 ranks cost more times what 8 do");
  app.add_flag("--json", as_json, "One JSON object instead of the table");
  CLI11_PARSE(app, argc, argv);
  settings.clock = clock == "cpu" ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
  torch::set_num_threads(1);

  Series groups{.what = "groups", .points = {}, .per_group = false};
  for (const int64_t layers : {4, 8, 16, 32, 64, 128}) {
    groups.points.push_back(
        transformer_point(settings, {.layers = layers}, static_cast<double>(layers + 1)));
  }
  Series params{.what = "parameters", .points = {}};
  for (const int64_t number : {9, 16, 24, 40, 80}) {
    params.points.push_back(transformer_point(
        settings, {.layers = 8, .params_per_block = number}, static_cast<double>(number)));
  }
  Series ranks{.what = "ranks", .points = {}};
  for (const int number : {8, 64, 256, 1024}) {
    ranks.points.push_back(rank_point(settings, number));
  }
  if (as_json) {
    std::cout
        << json{{"groups", groups.to_json()}, {"parameters", params.to_json()}, {"ranks", ranks.to_json()}}
        << std::endl;
  } else {
    for (const auto* series : {&groups, &params, &ranks}) {
      series->print();
    }
  }
  return !max_growth || ranks.growth() <= *max_growth ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
  return bench::bench_main("scale", run, argc, argv);
}
