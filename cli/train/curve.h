#pragma once

#include <string>
#include <vector>

namespace fsdp::cli {

struct CurveOptions {
  int width = 60; // characters
  int height = 8;
  bool unicode = true; // braille dots, else stars
};

/// Draws the values in their order as lines of text, with the highest and the lowest value as
/// labels. If there are many values, a column shows the mean of several. Values that are not finite
/// are left out. Returns no lines for fewer than two values.
std::vector<std::string> draw_curve(
    const std::vector<double>& values, const CurveOptions& options = {});

/// Returns true if the locale uses UTF-8.
bool has_unicode();

} // namespace fsdp::cli
