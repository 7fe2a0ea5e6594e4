#include "cli/train/curve.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <numeric>

#include "cli/train/progress.h"

namespace fsdp::cli {

namespace {

// A braille character has four rows of two dots. These are their bits in its code.
constexpr uint8_t kDots[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};

std::string braille(uint8_t dots) {
  const uint32_t code = 0x2800 + dots;
  return {
      static_cast<char>(0xe0 | (code >> 12)), static_cast<char>(0x80 | ((code >> 6) & 0x3f)),
      static_cast<char>(0x80 | (code & 0x3f))};
}

/// Divides the values into `count` equal parts and returns the mean of each. Repeats values if
/// there are fewer than `count`.
std::vector<double> resampled(const std::vector<double>& values, size_t count) {
  std::vector<double> means(count);
  for (size_t i = 0; i < count; ++i) {
    const auto begin = i * values.size() / count;
    const auto end = std::max(begin + 1, (i + 1) * values.size() / count);
    const auto sum = std::accumulate(values.begin() + begin, values.begin() + end, 0.0);
    means[i] = sum / static_cast<double>(end - begin);
  }
  return means;
}

} // namespace

bool has_unicode() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) { // the first that is set counts
    const char* value = std::getenv(name);
    if (value && *value) {
      const std::string text = value;
      return text.find("UTF-8") != std::string::npos || text.find("utf8") != std::string::npos;
    }
  }
  return false;
}

std::vector<std::string> draw_curve(
    const std::vector<double>& values, const CurveOptions& options) {
  std::vector<double> finite;
  std::copy_if(values.begin(), values.end(), std::back_inserter(finite), [](double value) {
    return std::isfinite(value);
  });
  if (finite.size() < 2) {
    return {};
  }
  const int across = options.unicode ? 2 : 1; // points per character
  const int down = options.unicode ? 4 : 1;
  const auto width = static_cast<size_t>(options.width);
  const auto points = resampled(finite, width * across);
  const auto [low, high] = std::minmax_element(points.begin(), points.end());
  const auto range = std::max(*high - *low, 1e-12);
  std::vector<std::vector<uint8_t>> cells(options.height, std::vector<uint8_t>(width));
  for (size_t x = 0; x < points.size(); ++x) {
    const auto y =
        static_cast<int>(std::lround((*high - points[x]) / range * (options.height * down - 1)));
    cells[y / down][x / across] |= kDots[y % down][x % across];
  }
  std::vector<std::string> lines;
  for (int row = 0; row < options.height; ++row) {
    const auto label = row == 0                    ? fixed(*high, 4)
                       : row == options.height - 1 ? fixed(*low, 4)
                                                   : std::string();
    auto line = std::string(10 - std::min<size_t>(10, label.size()), ' ') + label + " ";
    for (const auto dots : cells[row]) {
      line += options.unicode ? braille(dots) : dots ? "*" : " ";
    }
    lines.push_back(line);
  }
  return lines;
}

} // namespace fsdp::cli
