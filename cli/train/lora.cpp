#include "cli/train/lora.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <sstream>

#include "cli/check.h"
#include "cli/nearest.h"

namespace fsdp::cli {

namespace {

const std::vector<std::string> kProjections{"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                            "gate_proj", "up_proj", "down_proj"};

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text + separator); // also a last part that is empty
  for (std::string part; std::getline(stream, part, separator);) {
    parts.push_back(part);
  }
  return parts;
}

/// The number that is all of the text. NaN if there is none.
double number_in(const std::string& text) {
  double number = 0;
  const auto* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stopped == end ? number : std::nan("");
}

} // namespace

bool Lora::trains(const std::string& projection) const {
  return std::find(targets.begin(), targets.end(), projection) != targets.end();
}

void Lora::check(const std::string& about) const {
  constexpr int64_t kMostRank = 1 << 16;
  check_config(
      rank >= 1 && rank <= kMostRank, about, ": the rank must be a whole number, 1 or more, and ",
      kMostRank, " at most");
  check_config(alpha > 0 && std::isfinite(alpha), about, ": alpha must be above 0, and finite");
  check_config(!targets.empty(), about, ": it trains no projection");
  for (const auto& target : targets) {
    check_config(
        std::find(kProjections.begin(), kProjections.end(), target) != kProjections.end(), about,
        ": there is no projection '", target, "'", did_you_mean(target, kProjections));
  }
}

std::string Lora::str() const {
  char number[32];
  char* const end = std::to_chars(number, number + sizeof(number), alpha).ptr;
  auto text = "rank=" + std::to_string(rank) + ",alpha=" + std::string(std::begin(number), end) +
              ",targets=";
  for (const auto& target : kProjections) { // in this order
    text += !trains(target) ? "" : text.ends_with('=') ? target : "+" + target;
  }
  return text;
}

std::optional<Lora> Lora::parse(const std::string& text) {
  if (text == "none") {
    return std::nullopt;
  }
  Lora lora;
  std::set<std::string> given;
  for (const auto& part : split(text, ',')) {
    const auto equals = std::min(part.find('='), part.size());
    const auto key = part.substr(0, equals);
    const auto value = part.substr(std::min(equals + 1, part.size()));
    check_config(given.insert(key).second, "--lora ", text, ": ", key, " is given twice");
    if (key == "rank") {
      const auto rank = number_in(value);
      lora.rank = rank == std::floor(rank) && std::abs(rank) < 1e9 ? static_cast<int64_t>(rank) : 0;
    } else if (key == "alpha") {
      lora.alpha = number_in(value);
    } else if (key == "targets") {
      lora.targets = split(value, '+');
    } else {
      throw_config_error(
          "--lora ", text, ": '", part,
          "' is not known; write for example --lora rank=16,alpha=32,targets=q_proj+v_proj");
    }
  }
  check_config(
      given.contains("rank"), "--lora ", text, ": give a rank, for example --lora rank=16");
  if (!given.contains("alpha")) {
    lora.alpha = 2 * static_cast<double>(lora.rank);
  }
  if (!given.contains("targets")) {
    lora.targets = kProjections;
  }
  lora.check("--lora " + text);
  return lora;
}

const std::vector<std::string>& lora_projections() {
  return kProjections;
}

bool is_adapter(std::string_view name) {
  return name.find(".lora_") != std::string_view::npos;
}

} // namespace fsdp::cli
