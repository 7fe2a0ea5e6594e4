#pragma once

#include <nlohmann/json.hpp>

#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "measure.h"
#include "overhead_model.h"
#include "overhead_phases.h"

namespace bench {

struct Measured {
  int64_t groups = 0;
  /// Seconds per step of every round, by form (a, b, c, d, e) and part.
  std::map<char, std::array<std::vector<double>, kParts>> rounds;
  /// Seconds per step inside the sharding engine, for the forms b, d and e.
  std::map<char, PhaseTimes> phases;
  /// Seconds of the fake groups alone, per group and step.
  double ours_fake = 0;
  double torch_fake = 0;
};

/// Computes costs and ratios within each round, and shows them as a table or as JSON.
class Report {
 public:
  explicit Report(Measured measured)
      : measured_(std::move(measured)),
        groups_(static_cast<double>(measured_.groups)),
        has_python_(measured_.rounds.contains('c')),
        has_partly_(measured_.rounds.contains('e')) {}

  Figure time(char form, Part part) const {
    return Figure(measured_.rounds.at(form)[part]);
  }
  /// Seconds per group and step that `sharded` takes more than `plain`.
  std::vector<double> cost(char sharded, char plain, Part part) const {
    return by_round([&](size_t i) {
      return (measured_.rounds.at(sharded)[part][i] - measured_.rounds.at(plain)[part][i]) /
             groups_;
    });
  }
  Figure cost_ratio(Part part, double less_theirs = 0, double less_ours = 0) const {
    const auto theirs = cost('d', 'c', part);
    const auto ours = cost('b', 'a', part);
    return Figure(
        by_round([&](size_t i) { return (theirs[i] - less_theirs) / (ours[i] - less_ours); }));
  }
  Figure step_ratio() const {
    return Figure(by_round([&](size_t i) {
      return measured_.rounds.at('d')[Step][i] / measured_.rounds.at('b')[Step][i];
    }));
  }
  /// Without the time of the fake groups, which differs between ours and torch's.
  Figure cost_ratio_without_fake() const {
    return cost_ratio(Step, measured_.torch_fake, measured_.ours_fake);
  }

  nlohmann::json to_json() const {
    nlohmann::json out;
    for (const auto& [form, parts] : measured_.rounds) {
      for (int part = 0; part < kParts; ++part) {
        out["seconds_per_step"][std::string(1, form)][kPartNames[part]] =
            Figure(parts[part]).to_json();
      }
    }
    auto& costs = out["seconds_per_group_and_step"];
    for (const auto& [who, sharded, plain] : sides()) {
      for (int part = 0; part < kParts; ++part) {
        costs[who][kPartNames[part]] =
            Figure(cost(sharded, plain, static_cast<Part>(part))).to_json();
      }
      for (int phase = 0; phase < kPhases; ++phase) {
        costs[who]["phases"][kPhaseNames[phase]] = phase_cost(sharded, phase);
      }
    }
    out["fake_group_seconds_per_group_and_step"] = {
        {"ours", measured_.ours_fake}, {"torch", measured_.torch_fake}};
    if (has_python_) {
      out["cost_ratio"] = cost_ratio(Step).to_json();
      out["cost_ratio_forward_backward"] = cost_ratio(ForwardBackward).to_json();
      out["cost_ratio_without_fake_groups"] = cost_ratio_without_fake().to_json();
      out["step_ratio"] = step_ratio().to_json();
    }
    return out;
  }

  void print() const {
    printf("%-22s %9s %19s", "ms per step", "median", "[quartiles]");
    printf("%19s %12s\n", "forward, backward", "optimizer");
    const std::pair<char, const char*> names[] = {
        {'a', "a  C++"},
        {'b', "b  C++ fully_shard"},
        {'e', "e  b, small ones whole"},
        {'c', "c  Python"},
        {'d', "d  Python FSDP2"}};
    for (const auto& [form, name] : names) {
      if (!measured_.rounds.contains(form)) {
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
    print_cost("(b - a) / groups", 'b', 'a', measured_.ours_fake);
    if (has_partly_) {
      print_cost("(e - a) / groups", 'e', 'a', std::nullopt);
      print_cost("(e - b) / groups", 'e', 'b', std::nullopt);
    }
    if (has_python_) {
      print_cost("(d - c) / groups", 'd', 'c', measured_.torch_fake);
    }
    print_phases();
    if (has_python_) {
      printf("\n%-22s\n", "ratio");
      print_ratio("(d - c) / (b - a)", cost_ratio(Step));
      print_ratio("  forward, backward", cost_ratio(ForwardBackward));
      print_ratio("  without fake groups", cost_ratio_without_fake());
      print_ratio("d / b", step_ratio());
    }
  }

 private:
  struct Side {
    const char* who;
    char sharded, plain;
  };
  std::vector<Side> sides() const {
    std::vector<Side> sides{{"ours", 'b', 'a'}};
    if (has_partly_) {
      sides.push_back({"min_shard_numel", 'e', 'a'});
    }
    if (has_python_) {
      sides.push_back({"python", 'd', 'c'});
    }
    return sides;
  }
  double phase_cost(char form, int phase) const {
    return measured_.phases.at(form)[phase] / groups_;
  }

  void print_cost(const char* name, char sharded, char plain, std::optional<double> fake) const {
    const Figure step(cost(sharded, plain, Step));
    printf(
        "%-22s %9.1f   [%7.1f, %7.1f]", name, step.median * 1e6, step.low * 1e6, step.high * 1e6);
    printf(
        " %18.1f %12.1f", Figure(cost(sharded, plain, ForwardBackward)).median * 1e6,
        Figure(cost(sharded, plain, Optimizer)).median * 1e6);
    if (fake) {
      printf("   of which the fake group itself %.1f", *fake * 1e6);
    }
    printf("\n");
  }

  /// The optimizer's cost is a difference between two forms, as in the table above.
  /// "between" is the rest of forward and backward, which the phases do not cover:
  /// autograd's nodes and calls.
  void print_phases() const {
    printf("\n%-22s", "by phase");
    for (const auto* name : kPhaseNames) {
      printf(" %13s", name);
    }
    printf(" %13s %13s\n", "between", "optimizer");
    for (const auto& [who, sharded, plain] : sides()) {
      printf("%-22s", who);
      double between = Figure(cost(sharded, plain, ForwardBackward)).median;
      for (int phase = 0; phase < kPhases; ++phase) {
        printf(" %13.1f", phase_cost(sharded, phase) * 1e6);
        between -= phase_cost(sharded, phase);
      }
      printf(
          " %13.1f %13.1f\n", between * 1e6, Figure(cost(sharded, plain, Optimizer)).median * 1e6);
    }
  }

  static void print_ratio(const char* name, const Figure& figure) {
    printf("%-22s %9.2f   [%7.2f, %7.2f]\n", name, figure.median, figure.low, figure.high);
  }

  template <class Combine>
  std::vector<double> by_round(Combine combine) const {
    return bench::by_round(measured_.rounds.at('a')[Step].size(), combine);
  }

  const Measured measured_;
  const double groups_;
  const bool has_python_;
  const bool has_partly_;
};

} // namespace bench
