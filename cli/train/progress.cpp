#include "cli/train/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <vector>

namespace fsdp::cli {

namespace {

constexpr int64_t kPlainLines = 20; // for a whole run, if stdout is not a terminal
constexpr int kBarWidth = 20;
constexpr int kShortBar = 10;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string minutes(double seconds) {
  const auto whole = static_cast<int64_t>(std::ceil(seconds));
  const auto rest = whole % 60;
  return std::to_string(whole / 60) + (rest < 10 ? ":0" : ":") + std::to_string(rest);
}

std::string padded(const std::string& text, size_t width) {
  return std::string(width - std::min(width, text.size()), ' ') + text;
}

/// Divides `value` by `base` until it is smaller, and returns three digits and the unit.
std::string scaled(double value, double base, const std::vector<std::string>& units) {
  size_t unit = 0;
  while (value >= base && unit + 1 < units.size()) {
    value /= base;
    ++unit;
  }
  const int digits = unit == 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return fixed(value, digits) + units[unit];
}

} // namespace

Screen::Screen()
    : is_terminal_(isatty(STDOUT_FILENO) != 0 && variable("TERM") != "dumb"),
      color_(is_terminal_ && variable("NO_COLOR").empty()) {}

void Screen::line(const std::string& text) {
  if (replacing_) {
    std::cout << "\r\x1b[K";
    replacing_ = false;
  }
  std::cout << text << std::endl;
}

void Screen::labelled(const std::string& label, const std::string& text) {
  const auto shown = label + std::string(10 - std::min<size_t>(10, label.size()), ' ');
  line((color_ ? "\x1b[1m" + shown + "\x1b[0m" : shown) + text);
}

void Screen::replace(const std::string& text) {
  if (is_terminal_) {
    std::cout << "\r\x1b[K" << text.substr(0, width()) << std::flush;
    replacing_ = true;
  }
}

size_t Screen::width() {
  winsize size{};
  const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return (known ? size.ws_col : 80) - 1; // a full line may wrap, and then cannot be rewritten
}

std::string join_fitting(std::vector<LinePiece> pieces, size_t width) {
  while (true) {
    std::string text;
    for (const auto& piece : pieces) {
      text += piece.text;
    }
    const auto last = std::ranges::max_element(pieces, {}, &LinePiece::rank);
    if (text.size() <= width || last == pieces.end() || last->rank == 0) {
      return text;
    }
    pieces.erase(last);
  }
}

Progress::Progress(Screen& screen, int64_t steps, int64_t tokens_per_step, int64_t before)
    : screen_(screen), steps_(steps), tokens_per_step_(tokens_per_step), before_(before) {}

double Progress::seconds() const {
  return seconds_since(start_);
}

std::vector<LinePiece> Progress::pieces(const StepRecord& record, int bar_width) const {
  const auto done = record.step;
  const auto steps = std::to_string(steps_);
  const auto per_step = seconds() / static_cast<double>(done - before_);
  const auto rate = std::llround(static_cast<double>(tokens_per_step_) / per_step);
  std::vector<LinePiece> pieces{
      {"step " + padded(std::to_string(done), steps.size()) + "/" + steps}};
  if (bar_width > 0) {
    const auto full = static_cast<int>(bar_width * done / steps_);
    pieces.push_back({"  " + std::string(full, '#') + std::string(bar_width - full, '.'), 5});
  }
  pieces.push_back({"  loss " + fixed(record.result.loss, 4)});
  pieces.push_back({"  norm " + fixed(record.result.grad_norm, 3), 4});
  pieces.push_back({"  " + padded(std::to_string(rate), 6) + " tokens/s", 3});
  if (record.utilisation) {
    // In the mean, as the tokens beside it; the record has the step's.
    const auto mean = *record.utilisation * static_cast<double>(rate) / record.tokens_per_s;
    pieces.push_back({"  MFU " + fixed(100 * mean, 1) + " %", 5});
  }
  pieces.push_back({"  " + binary_size(record.result.memory.peak), 7});
  pieces.push_back({"  comm " + fixed(record.exposed_s * 1000, 1) + " ms", 6});
  const auto left = per_step * static_cast<double>(steps_ - done);
  pieces.push_back({"  " + minutes(left) + " left", 1});
  if (record.result.skipped) {
    pieces.push_back({"  skipped: not finite in fp16", 2});
  }
  return pieces;
}

void Progress::update(const StepRecord& record) {
  if (screen_.is_terminal()) {
    const auto width = Screen::width();
    const auto whole = join_fitting(pieces(record, kBarWidth), std::string::npos);
    screen_.replace(whole.size() <= width ? whole : join_fitting(pieces(record, kShortBar), width));
    return;
  }
  const auto done = record.step;
  const auto every = std::max<int64_t>(1, steps_ / kPlainLines);
  if (done == before_ + 1 || done % every == 0 || done == steps_) {
    screen_.line(join_fitting(pieces(record, /*bar_width=*/0), std::string::npos));
  }
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string binary_size(int64_t bytes) {
  return scaled(static_cast<double>(bytes), 1024, {" B", " KiB", " MiB", " GiB", " TiB"});
}

std::string plural(int64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string decimal_count(int64_t count, const std::string& unit) {
  return scaled(
      static_cast<double>(count), 1000,
      {" " + unit, " k" + unit, " M" + unit, " G" + unit, " T" + unit});
}

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

std::string printable(const std::string& text) {
  auto result = text;
  for (auto& c : result) {
    const bool is_plain = c == '\n' || c == '\t' || (c >= ' ' && c <= '~');
    c = is_plain ? c : '?';
  }
  return result;
}

} // namespace fsdp::cli
