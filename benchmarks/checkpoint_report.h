#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint_rank.h"
#include "measure.h"

namespace bench {

using nlohmann::json;

// The limits of --check.
inline constexpr double kMinSpeed = 1;    // DCP's time / ours
inline constexpr double kMaxAsync = 0.1;  // time until async_save returns / time of save
inline constexpr double kMaxMemory = 1.2; // memory beyond the model / a rank's shard
inline constexpr double kMaxBeside = 1.4; // Measured::beside; DCP has 1.8

inline constexpr const char* kCommands[] = {"save", "load", "async"};

/// What was measured in each round, by command.
using Rounds = std::map<std::string, std::vector<Measured>>;

struct Result {
  Rounds ours;
  Rounds dcp; // empty if there was no Python side
};

inline Figure figure_of(const std::vector<Measured>& rounds, double Measured::* member) {
  return Figure(by_round(rounds.size(), [&](size_t i) { return rounds[i].*member; }));
}

/// The ratio of the times, taken within each round.
inline Figure ratio(const std::vector<Measured>& above, const std::vector<Measured>& below) {
  return Figure(
      by_round(above.size(), [&](size_t i) { return above[i].seconds / below[i].seconds; }));
}

/// The largest extra memory of all rounds / a shard. Negative: unknown.
inline double most_memory(const std::vector<Measured>& rounds, int64_t shard_bytes) {
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
        model_gib_(static_cast<double>(model_bytes) / (1 << 30)) {}

  void print() const {
    printf(
        "%-6s %-5s %9s %19s %8s %15s\n", "", "", "seconds", "[quartiles]", "GiB/s",
        "memory / shard");
    for (const std::string command : kCommands) {
      print_row(command, "ours", result_.ours.at(command));
      if (has_dcp()) {
        print_row(command, "DCP", result_.dcp.at(command));
      }
    }
    printf("\n%-26s %9s %19s\n", "ratio", "median", "[quartiles]");
    for (const std::string command : kCommands) {
      if (has_dcp()) {
        print_ratio(command + ": DCP / ours", speed(command));
      }
    }
    print_ratio("our async / our save", async_part());
    print_ratio("compute beside our async", figure_of(result_.ours.at("async"), &Measured::beside));
    if (has_dcp()) {
      print_ratio(
          "compute beside DCP's async", figure_of(result_.dcp.at("async"), &Measured::beside));
    }
  }

  json to_json() const {
    json out;
    const auto add = [&](const char* side, const Rounds& rounds) {
      for (const auto& [command, measured] : rounds) {
        auto& place = out[side][command];
        place["seconds"] = figure_of(measured, &Measured::seconds).to_json();
        place["memory_per_shard"] = most_memory(measured, shard_bytes_);
        if (command == "async") {
          place["seconds_until_saved"] = figure_of(measured, &Measured::total).to_json();
          place["compute_beside"] = figure_of(measured, &Measured::beside).to_json();
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

  /// The limits that were missed, as sentences.
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
    expect(
        figure_of(result_.ours.at("async"), &Measured::beside).median <= kMaxBeside,
        c10::str("compute beside async_save takes more than ", kMaxBeside, " of its time"));
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
    const auto figure = figure_of(rounds, &Measured::seconds);
    printf(
        "%-6s %-5s %9.3f   [%7.3f, %7.3f]", command.c_str(), side, figure.median, figure.low,
        figure.high);
    printf(" %8.2f", model_gib_ / figure_of(rounds, &Measured::total).median);
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

} // namespace bench
