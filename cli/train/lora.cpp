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

std::string Lora::str() const {
  std::ostringstream text;
  text << "rank=" << rank << ",alpha=" << alpha << ",targets=";
  for (const auto& target : targets) {
    text << (&target == &targets.front() ? "" : "+") << target;
  }
  return text.str();
}

std::optional<Lora> Lora::parse(const std::string& text) {
  constexpr double kMostRank = 1 << 16;
  if (text == "none") {
    return std::nullopt;
  }
  Lora lora;
  std::set<std::string> given;
  std::set<std::string> targets;
  for (const auto& part : split(text, ',')) {
    const auto equals = std::min(part.find('='), part.size());
    const auto key = part.substr(0, equals);
    const auto value = part.substr(std::min(equals + 1, part.size()));
    check_config(given.insert(key).second, "--lora ", text, ": ", key, " is given twice");
    const auto number = number_in(value);
    if (key == "rank") {
      check_config(
          number >= 1 && number <= kMostRank && number == std::floor(number), "--lora ", text,
          ": the rank must be a whole number, 1 or more, and ", kMostRank, " at most");
      lora.rank = static_cast<int64_t>(number);
    } else if (key == "alpha") {
      check_config(
          number > 0 && std::isfinite(number), "--lora ", text,
          ": alpha must be above 0, and finite");
      lora.alpha = number;
    } else if (key == "targets") {
      for (const auto& target : split(value, '+')) {
        check_config(
            std::find(kProjections.begin(), kProjections.end(), target) != kProjections.end(),
            "--lora ", text, ": there is no projection '", target, "'",
            did_you_mean(target, kProjections));
        targets.insert(target);
      }
    } else {
      throw_config_error(
          "--lora ", text, ": '", part,
          "' is not known; write for example --lora rank=16,alpha=32,targets=q_proj+v_proj");
    }
  }
  check_config(lora.rank > 0, "--lora ", text, ": give a rank, for example --lora rank=16");
  lora.alpha = lora.alpha > 0 ? lora.alpha : 2 * static_cast<double>(lora.rank);
  for (const auto& projection : kProjections) {
    if (targets.empty() || targets.contains(projection)) {
      lora.targets.push_back(projection);
    }
  }
  return lora;
}

bool is_adapter(std::string_view name) {
  return name.find(".lora_") != std::string_view::npos;
}

} // namespace fsdp::cli
