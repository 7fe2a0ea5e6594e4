#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "cli/train/metrics.h"

namespace fsdp::cli {

/// What a person sees on stdout. On a terminal the progress is one line,
/// rewritten in place; elsewhere a plain line now and then.
class Screen {
 public:
  /// Looks at stdout, TERM and NO_COLOR.
  Screen();

  /// A line that stays.
  void line(const std::string& text);
  /// A line "label  text", the label set off.
  void labelled(const std::string& label, const std::string& text);
  /// Replaces the line in place; on a terminal only.
  void replace(const std::string& text);

  bool is_terminal() const {
    return is_terminal_;
  }
  /// What fits into the line that is replaced.
  static size_t width();

 private:
  bool is_terminal_;
  bool color_;
  bool replacing_ = false; // the cursor is behind a line that goes
};

/// A piece of a line; of those that have to go the one with the highest `rank` goes
/// first, and those of rank 0 stay.
struct LinePiece {
  std::string text;
  int rank = 0;
};

/// Those that fit, in their order.
std::string fitted(std::vector<LinePiece> pieces, size_t width);

/// The progress of a run of `steps` updates, of which a resumed one has `before`
/// behind it.
class Progress {
 public:
  Progress(Screen& screen, int64_t steps, int64_t tokens_per_step, int64_t before = 0);

  /// After each update; its number counts from 1, those before too.
  void update(const StepRecord& record);

  double seconds() const;

 private:
  std::string plain(const StepRecord& record) const;
  std::string with_bar(const StepRecord& record, size_t width) const;
  std::vector<LinePiece> pieces(const StepRecord& record, int bar_width) const;

  Screen& screen_;
  const int64_t steps_;
  const int64_t tokens_per_step_;
  const int64_t before_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// "1.50 MiB", "12.3 MB": three digits and a unit of 1024 or 1000.
std::string binary_size(int64_t bytes);
std::string decimal_count(int64_t count, const std::string& unit);
/// "1 rank", "2 ranks".
std::string plural(int64_t count, const std::string& noun);
/// Fixed-point text.
std::string fixed(double value, int digits);
/// Without bytes that would do something to a terminal.
std::string printable(const std::string& text);

} // namespace fsdp::cli
