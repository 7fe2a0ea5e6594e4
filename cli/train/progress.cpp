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

constexpr int64_t kPlainLines = 20; // of a run that no terminal shows
constexpr int kBarWidth = 20;

size_t terminal_width() {
  winsize size{};
  return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

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

/// Three digits of `value`, divided until it is below `base`.
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
  if (is_terminal_) { // one that reached the edge would stay behind
    std::cout << "\r\x1b[K" << text.substr(0, terminal_width() - 1) << std::flush;
    replacing_ = true;
  }
}

Progress::Progress(Screen& screen, int64_t steps, int64_t tokens_per_step, int64_t before)
    : screen_(screen), steps_(steps), tokens_per_step_(tokens_per_step), before_(before) {}

double Progress::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

std::string Progress::text(const StepRecord& record, bool with_bar) const {
  const auto done = record.step;
  const auto steps = std::to_string(steps_);
  const auto per_step = seconds() / static_cast<double>(done - before_);
  std::string bar;
  if (with_bar) {
    const auto full = static_cast<int>(kBarWidth * done / steps_);
    bar = "  " + std::string(full, '#') + std::string(kBarWidth - full, '.');
  }
  const auto rate = std::llround(static_cast<double>(tokens_per_step_) / per_step);
  const auto exposed =
      record.exposed_s ? "  comm " + fixed(*record.exposed_s * 1000, 1) + " ms" : std::string();
  return "step " + padded(std::to_string(done), steps.size()) + "/" + steps + bar + "  loss " +
         fixed(record.loss, 4) + "  norm " + fixed(record.grad_norm, 3) + "  " +
         padded(std::to_string(rate), 6) + " tokens/s  " + binary_size(record.memory.peak) +
         exposed + "  " + minutes(per_step * static_cast<double>(steps_ - done)) + " left" +
         (record.skipped ? "  skipped: not finite in fp16" : "");
}

void Progress::update(const StepRecord& record) {
  if (screen_.is_terminal()) {
    screen_.replace(text(record, /*with_bar=*/true));
    return;
  }
  const auto done = record.step;
  const auto every = std::max<int64_t>(1, steps_ / kPlainLines);
  if (done == before_ + 1 || done % every == 0 || done == steps_) {
    screen_.line(text(record, /*with_bar=*/false));
  }
}

std::string binary_size(int64_t bytes) {
  return scaled(static_cast<double>(bytes), 1024, {" B", " KiB", " MiB", " GiB", " TiB"});
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
