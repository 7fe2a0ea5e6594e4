#pragma once

#include <string>
#include <vector>

namespace fsdp::cli {

struct CurveOptions {
  int width = 60; // characters
  int height = 8;
  bool unicode = true; // braille, else stars
};

/// Lines that show the values over their order, with the highest and the lowest
/// beside them. Of many values each column shows the mean of its part; none that
/// is not finite counts. Empty for less than two.
std::vector<std::string> draw_curve(
    const std::vector<double>& values, const CurveOptions& options = {});

/// Whether the locale says that text is UTF-8.
bool has_unicode();

} // namespace fsdp::cli
