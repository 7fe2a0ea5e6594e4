#include "cli/nearest.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>

namespace fsdp::cli {

namespace {

/// Levenshtein distance: how many letters have to be added, removed or changed.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const auto changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, changed});
    }
  }
  return row[b.size()];
}

} // namespace

std::string nearest(const std::string& word, const std::vector<std::string>& known) {
  std::string best;
  size_t least = std::max<size_t>(2, word.size() / 3) + 1;
  for (const auto& candidate : known) {
    // The beginning of a known word is similar to it, however many letters are missing.
    const bool begun = word.size() >= 5 && candidate.starts_with(word);
    const auto away = begun ? 1 : distance(word, candidate);
    if (away < least && away < candidate.size()) {
      least = away;
      best = candidate;
    }
  }
  return best;
}

std::string did_you_mean(const std::string& word, const std::vector<std::string>& known) {
  const auto best = nearest(word, known);
  if (!best.empty()) {
    return "; did you mean '" + best + "'?";
  }
  return "; there are: " + c10::Join(", ", known);
}

} // namespace fsdp::cli
