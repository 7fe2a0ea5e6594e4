#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <utility>
#include <vector>

// Clocks and statistics of the benchmarks.

namespace bench {

/// Seconds of a clock: by default wall time, else processor time of this process or thread.
inline double now(clockid_t clock = CLOCK_MONOTONIC) {
  timespec time;
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

inline double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const double place = q * static_cast<double>(values.size() - 1);
  const auto low = static_cast<size_t>(place);
  const auto high = std::min(low + 1, values.size() - 1);
  return values[low] + (place - static_cast<double>(low)) * (values[high] - values[low]);
}

inline double median(std::vector<double> values) {
  return quantile(std::move(values), 0.5);
}

/// The median of the rounds, and the quartiles as their spread.
struct Figure {
  double median = 0, low = 0, high = 0;

  explicit Figure(const std::vector<double>& rounds)
      : median(quantile(rounds, 0.5)), low(quantile(rounds, 0.25)), high(quantile(rounds, 0.75)) {}

  nlohmann::json to_json() const {
    return {{"median", median}, {"low", low}, {"high", high}};
  }
};

/// Returns `combine(i)` for every round i.
template <class Combine>
std::vector<double> by_round(size_t rounds, Combine combine) {
  std::vector<double> result;
  for (size_t i = 0; i < rounds; ++i) {
    result.push_back(combine(i));
  }
  return result;
}

/// The line `intercept + slope * x` that fits the points best by least squares.
struct Line {
  double intercept = 0, slope = 0;
  double r2 = 0;    // the share of y's variance that the line explains
  double worst = 0; // the largest distance of a point from the line, divided by the point's y

  Line(const std::vector<double>& x, const std::vector<double>& y) {
    const auto n = static_cast<double>(x.size());
    double sum_x = 0, sum_y = 0, sum_xx = 0, sum_xy = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      sum_x += x[i];
      sum_y += y[i];
      sum_xx += x[i] * x[i];
      sum_xy += x[i] * y[i];
    }
    slope = (n * sum_xy - sum_x * sum_y) / (n * sum_xx - sum_x * sum_x);
    intercept = (sum_y - slope * sum_x) / n;
    double around_line = 0, around_mean = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const auto off = intercept + slope * x[i] - y[i];
      worst = std::max(worst, std::abs(off) / std::abs(y[i]));
      around_line += off * off;
      around_mean += (y[i] - sum_y / n) * (y[i] - sum_y / n);
    }
    r2 = around_mean > 0 ? 1 - around_line / around_mean : 1;
  }
};

} // namespace bench
