#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "cli/train/metrics.h"

namespace fsdp::cli {

/// Prints lines for people on stdout. On a terminal the last line can be rewritten in place.
class Screen {
 public:
  /// Reads TERM and NO_COLOR, and checks whether stdout is a terminal.
  Screen();

  /// Prints a line that stays.
  void line(const std::string& text);
  /// Prints "label  text", with the label in bold if the terminal has colors.
  void labelled(const std::string& label, const std::string& text);
  /// Rewrites the last line in place. Does nothing if stdout is not a terminal.
  void replace(const std::string& text);

  bool is_terminal() const {
    return is_terminal_;
  }
  /// The number of characters that fit into a line that is rewritten.
  static size_t width();

 private:
  bool is_terminal_;
  bool color_;
  bool replacing_ = false; // the cursor is at the end of a line that will be rewritten
};

/// A piece of a line. If the line is too long, the piece with the highest `rank` is dropped first.
/// Pieces of rank 0 are never dropped.
struct LinePiece {
  std::string text;
  int rank = 0;
};

/// Joins the pieces that fit into `width` characters, in their order.
std::string join_fitting(std::vector<LinePiece> pieces, size_t width);

/// Shows the progress of a run of `steps` updates. A resumed run has already made `before` of them.
/// On a terminal the progress is one line that is rewritten, elsewhere a plain line now and then.
class Progress {
 public:
  Progress(Screen& screen, int64_t steps, int64_t tokens_per_step, int64_t before = 0);

  /// Call it after each update. The step of the record counts from 1, also in a resumed run.
  void update(const StepRecord& record);

  double seconds() const;

 private:
  std::vector<LinePiece> pieces(const StepRecord& record, int bar_width) const;

  Screen& screen_;
  const int64_t steps_;
  const int64_t tokens_per_step_;
  const int64_t before_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

double seconds_since(std::chrono::steady_clock::time_point start);
/// Three digits and a binary unit: "1.50 MiB".
std::string binary_size(int64_t bytes);
/// Three digits and a decimal unit: "12.3 MB".
std::string decimal_count(int64_t count, const std::string& unit);
/// The count and the noun, with an s if needed: "1 rank", "2 ranks".
std::string plural(int64_t count, const std::string& noun);
/// The value with `digits` digits after the point.
std::string fixed(double value, int digits);
/// Replaces bytes that could control a terminal, and all that are not ASCII, by '?'.
std::string printable(const std::string& text);

} // namespace fsdp::cli
