#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace bench {

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

/// A figure: the median of the rounds and, as spread, the quartiles.
struct Figure {
  double median = 0, low = 0, high = 0;

  explicit Figure(const std::vector<double>& rounds)
      : median(quantile(rounds, 0.5)), low(quantile(rounds, 0.25)), high(quantile(rounds, 0.75)) {}
};

/// `combine` of the rounds, one by one.
template <class Combine>
std::vector<double> by_round(size_t rounds, Combine combine) {
  std::vector<double> result;
  for (size_t i = 0; i < rounds; ++i) {
    result.push_back(combine(i));
  }
  return result;
}

} // namespace bench
