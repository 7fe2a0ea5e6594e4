// `./fsdp bench scale` measures how the host cost of sharding grows with the number of groups,
// parameters and ranks. Every point is the time of a step of a sharded model over a fake group
// less that of the plain model. A line is fitted to the points; if no line fits, the result means
// nothing and the program exits with 1. The difference is small, so the models compute almost
// nothing: one operator joins the parameters, and the mean is taken. (`bench overhead` shows the
// cost next to real layers.) Against noise, plain and sharded steps take turns, the sizes are
// measured in rising and falling order, and the clock is the thread's processor time.
//
// The number of ranks is varied with parameters of 1,024 rows, which divide evenly. With more
// ranks than rows most of the moved memory would be padding, and its copying would be measured.
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>

#include "bench_main.h"
#include "measure.h"

namespace {

using namespace bench;
using nlohmann::json;

constexpr int kWorldSize = 1024; // of the fake group; smaller groups are slices of a mesh

struct Settings {
  int rounds = 15;
  int steps = 10;
  clockid_t clock = CLOCK_THREAD_CPUTIME_ID;
};

// ------------------------------------------------------------ Models

struct Shape {
  int64_t groups = 8;
  int64_t params = 9; // of a group
  int64_t rows = 64;  // of a parameter
  int64_t columns = 16;
  int ranks = 8;
};

/// A module that becomes one group. It uses all of its parameters as cheaply as possible.
struct CheapModuleImpl : torch::nn::Module {
  explicit CheapModuleImpl(const Shape& shape) {
    for (int64_t i = 0; i < shape.params; ++i) {
      weights.push_back(register_parameter(
          "weight" + std::to_string(i), torch::ones({shape.rows, shape.columns})));
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return x * torch::cat(weights).mean();
  }
  std::vector<torch::Tensor> weights;
};
FSDP_MODULE(CheapModule);

struct CheapModelImpl : torch::nn::Module {
  explicit CheapModelImpl(const Shape& shape) {
    for (int64_t i = 0; i < shape.groups; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), CheapModule(shape)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) {
      x = layer(x);
    }
    return x;
  }
  std::vector<CheapModule> layers;
};
FSDP_MODULE(CheapModel);

class Model {
 public:
  Model(const Shape& shape, bool sharded) : net_(shape) {
    if (sharded) {
      const auto grid = fsdp::init_device_mesh(
          torch::kCPU, {kWorldSize / shape.ranks, shape.ranks}, {"others", "dp"});
      const fsdp::FullyShardOptions options{.mesh = grid["dp"], .reshard_after_forward = true};
      for (auto& layer : net_->layers) {
        fsdp::fully_shard(layer, options);
      }
      fsdp::fully_shard(net_, options); // no parameters of its own, so no group
    }
  }

  /// Runs a step and returns its seconds.
  double step(clockid_t clock) {
    const auto start = now(clock);
    net_(input_).sum().backward();
    net_->zero_grad();
    return now(clock) - start;
  }

 private:
  CheapModel net_;
  const torch::Tensor input_ = torch::ones({1, 16}, torch::requires_grad());
};

// ------------------------------------------------------------ Points

class Point {
 public:
  Point(double at, const Shape& shape)
      : at(at), groups(shape.groups), plain_(shape, false), sharded_(shape, true) {}

  void measure(const Settings& settings) {
    plain_.step(settings.clock); // warms up
    sharded_.step(settings.clock);
    std::vector<double> costs;
    for (int i = 0; i < settings.steps; ++i) {
      const auto plain = plain_.step(settings.clock);
      costs.push_back(sharded_.step(settings.clock) - plain);
    }
    rounds_.push_back(median(costs));
  }
  /// Seconds per step.
  Figure cost() const {
    return Figure(rounds_);
  }

  const double at; // the number of groups, parameters or ranks
  const int64_t groups;

 private:
  Model plain_;
  Model sharded_;
  std::vector<double> rounds_;
};

// ------------------------------------------------------------ Report

class Series {
 public:
  /// `what` names the number that is varied. Costs are per group and step, or per step.
  Series(const char* what, bool per_group) : what_(what), per_group_(per_group) {}

  void add(double at, const Shape& shape) {
    points_.push_back(std::make_unique<Point>(at, shape));
  }
  void measure(const Settings& settings) {
    for (int round = 0; round < settings.rounds; ++round) {
      for (const auto& point : points_) {
        point->measure(settings);
      }
      std::reverse(points_.begin(), points_.end());
    }
    std::sort(
        points_.begin(), points_.end(), [](const auto& a, const auto& b) { return a->at < b->at; });
  }

  double growth() const {
    return us(*points_.back()) / us(*points_.front());
  }
  /// Returns true if a line fits the points: either it explains their variance, or all
  /// points are close to it. The second holds for a flat line, which has no variance to
  /// explain.
  bool fits(double min_r2, double max_off) const {
    return line().r2 >= min_r2 || line().worst <= max_off;
  }
  std::string fit() const {
    const auto fitted = line();
    char text[160];
    snprintf(
        text, sizeof(text), "%.1f + %.4f us each, r2 %.3f, off by at most %.0f %%",
        fitted.intercept, fitted.slope, fitted.r2, 100 * fitted.worst);
    return text;
  }
  const char* what() const {
    return what_;
  }

  void print() const {
    printf("%-12s %14s\n", what_, per_group_ ? "us per group" : "us per step");
    for (const auto& point : points_) {
      const auto cost = point->cost();
      const double scale = us(*point) / cost.median;
      printf(
          "%12.0f %14.1f   [%9.1f, %9.1f]\n", point->at, us(*point), cost.low * scale,
          cost.high * scale);
    }
    printf("  fitted: %s; last / first: %.2f\n\n", fit().c_str(), growth());
    fflush(stdout);
  }
  json to_json() const {
    json out;
    for (const auto& point : points_) {
      out["points"].push_back(
          {{"at", point->at}, {"groups", point->groups}, {"seconds", point->cost().to_json()}});
    }
    const auto fitted = line();
    out["fitted_us"] = {
        {"intercept", fitted.intercept},
        {"slope", fitted.slope},
        {"r2", fitted.r2},
        {"worst", fitted.worst}};
    out["growth"] = growth();
    return out;
  }

 private:
  double us(const Point& point) const {
    return point.cost().median * 1e6 / (per_group_ ? static_cast<double>(point.groups) : 1);
  }
  Line line() const {
    std::vector<double> x, y;
    for (const auto& point : points_) {
      x.push_back(point->at);
      y.push_back(us(*point));
    }
    return {x, y};
  }

  const char* what_;
  const bool per_group_;
  std::vector<std::unique_ptr<Point>> points_;
};

// ------------------------------------------------------------ The command

std::vector<Series> measure_all(const Settings& settings) {
  std::vector<Series> all;
  auto& groups = all.emplace_back("groups", /*per_group=*/false);
  for (const int64_t number : {4, 8, 16, 32, 64, 128}) {
    groups.add(static_cast<double>(number), {.groups = number});
  }
  groups.measure(settings);
  auto& params = all.emplace_back("parameters", /*per_group=*/true);
  for (const int64_t number : {1, 9, 20, 40, 80}) {
    params.add(static_cast<double>(number), {.params = number});
  }
  params.measure(settings);
  auto& ranks = all.emplace_back("ranks", /*per_group=*/true);
  for (const int number : {8, 64, 256, 1024}) {
    ranks.add(number, {.rows = 1024, .columns = 32, .ranks = number});
  }
  ranks.measure(settings);
  return all;
}

int run(int argc, char** argv) {
  CLI::App app("How the host cost of sharding grows with groups, parameters and ranks.");
  Settings settings;
  std::string clock = "cpu";
  double min_r2 = 0.98;
  double max_off = 0.15;
  std::optional<double> max_growth;
  bool as_json = false;
  app.add_option("--rounds", settings.rounds, "Rounds, of which the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--steps", settings.steps, "Steps of each form in a round")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--clock", clock, "cpu: the thread's time on a processor; or wall")
      ->check(CLI::IsMember({"wall", "cpu"}))
      ->capture_default_str();
  app.add_option("--min-r2", min_r2, "A line fits from here on")->capture_default_str();
  app.add_option("--max-off", max_off, "Or if all points are this close to it, as a share of them")
      ->capture_default_str();
  app.add_option("--max-growth", max_growth, "Exit 1 if 1,024 ranks cost more times what 8 do");
  app.add_flag("--json", as_json, "One JSON object instead of the table");
  CLI11_PARSE(app, argc, argv);
  settings.clock = clock == "cpu" ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  torch::set_num_threads(1);
  fsdp::init_process_group({.backend = "fake", .rank = 0, .world_size = kWorldSize});

  const auto all = measure_all(settings);
  if (as_json) {
    json out;
    for (const auto& series : all) {
      out[series.what()] = series.to_json();
    }
    std::cout << out << std::endl;
  } else {
    for (const auto& series : all) {
      series.print();
    }
  }
  bool good = true;
  for (const auto& series : all) {
    if (!series.fits(min_r2, max_off)) {
      good = false;
      fprintf(stderr, "FAIL: no line fits the %s: %s\n", series.what(), series.fit().c_str());
    }
  }
  if (max_growth && all.back().growth() > *max_growth) {
    good = false;
    fprintf(
        stderr, "FAIL: %d ranks cost %.2f times what 8 do, more than %.2f\n", kWorldSize,
        all.back().growth(), *max_growth);
  }
  return good ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
  return bench::bench_main("scale", run, argc, argv);
}
