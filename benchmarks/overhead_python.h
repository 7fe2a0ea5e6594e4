#pragma once

#include <nlohmann/json.hpp>

#include <sstream>
#include <string>
#include <vector>

#include "child.h"
#include "overhead_model.h"
#include "overhead_phases.h"

namespace bench {

/// overhead.py in a child process.
class Python {
 public:
  explicit Python(const Options& options) : child_(words(options)) {
    if (const auto line = child_.read_line()) {
      hello_ = nlohmann::json::parse(*line);
    }
  }

  /// Why the Python side cannot be compared with; empty if it can.
  std::string missing() const {
    if (hello_.is_null()) {
      return "it could not start";
    }
    return hello_["no_fsdp"].is_null() ? ""
                                       : "no fully_shard: " + hello_["no_fsdp"].get<std::string>();
  }
  const nlohmann::json& hello() const {
    return hello_;
  }
  nlohmann::json check() {
    return nlohmann::json::parse(child_.ask("check"));
  }
  double time_fake_group(int64_t shard_numel, int repeats) {
    return numbers<1>(c10::str("fake ", shard_numel, " ", repeats))[0];
  }
  Times time(const char* model, int steps) {
    return numbers<kParts>(c10::str(model, " ", steps));
  }
  PhaseTimes time_phases(int steps) {
    return numbers<kPhases>(c10::str("phases ", steps));
  }

 private:
  static std::vector<std::string> words(const Options& options) {
    std::vector<std::string> words{options.python, options.script};
    const auto add = [&](const char* name, const auto& value) {
      words.push_back(std::string("--") + name);
      words.push_back(c10::str(value));
    };
    add("dim", options.model.dim);
    add("layers", options.model.layers);
    add("heads", options.model.heads);
    add("vocabulary", options.model.vocabulary);
    add("params-per-group", options.model.params_per_block);
    add("sequence", options.sequence);
    add("world-size", options.world_size);
    add("dtype", options.dtype);
    add("optimizer", options.optimizer);
    add("clock", options.clock);
    return words;
  }

  template <size_t N>
  std::array<double, N> numbers(const std::string& command) {
    std::istringstream answer(child_.ask(command));
    std::array<double, N> result;
    for (auto& number : result) {
      answer >> number;
    }
    TORCH_CHECK(answer, "the Python side answered '", answer.str(), "' to '", command, "'");
    return result;
  }

  Child child_;
  nlohmann::json hello_;
};

} // namespace bench
