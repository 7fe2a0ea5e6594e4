// `./fsdp bench optim` compares a step of fsdp::optim with one of torch::optim on many
// small parameters, on one thread. Both take turns over several rounds. Shows the medians
// of the times and of their ratio.
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>

namespace {

using Clock = std::chrono::steady_clock;

struct Settings {
  int params = 300;
  int64_t numel = 256;
  int rounds = 21;
  int steps = 20;
  bool json = false;
};

std::vector<torch::Tensor> make_params(const Settings& settings) {
  std::vector<torch::Tensor> params;
  for (int i = 0; i < settings.params; ++i) {
    params.push_back(torch::randn({settings.numel}, torch::requires_grad()));
    params.back().mutable_grad() = torch::randn({settings.numel});
  }
  return params;
}

/// Microseconds per step.
double time(torch::optim::Optimizer& optimizer, int steps) {
  const auto start = Clock::now();
  for (int i = 0; i < steps; ++i) {
    optimizer.step();
  }
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / steps;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

template <class Torch, class Ours, class Options>
nlohmann::json compare(const char* name, const Options& options, const Settings& settings) {
  Torch torchs(make_params(settings), options);
  Ours ours(make_params(settings), options);
  std::vector<double> torch_times;
  std::vector<double> our_times;
  std::vector<double> ratios;
  time(torchs, settings.steps);
  time(ours, settings.steps);
  for (int round = 0; round < settings.rounds; ++round) {
    torch_times.push_back(time(torchs, settings.steps));
    our_times.push_back(time(ours, settings.steps));
    ratios.push_back(torch_times.back() / our_times.back());
  }
  const auto [low, high] = std::minmax_element(ratios.begin(), ratios.end());
  return {
      {"optimizer", name},
      {"torch_us", median(torch_times)},
      {"fsdp_us", median(our_times)},
      {"ratio", median(ratios)},
      {"ratio_low", *low},
      {"ratio_high", *high}};
}

} // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("A step of fsdp::optim next to torch::optim's on many small parameters");
  app.add_option("--params", settings.params, "how many parameters")->capture_default_str();
  app.add_option("--numel", settings.numel, "elements of each")->capture_default_str();
  app.add_option("--rounds", settings.rounds)->capture_default_str();
  app.add_flag("--json", settings.json);
  CLI11_PARSE(app, argc, argv);
  torch::set_num_threads(1);

  using torch::optim::AdamWOptions;
  using torch::optim::SGDOptions;
  const auto rows = nlohmann::json::array(
      {compare<torch::optim::AdamW, fsdp::optim::AdamW>("AdamW", AdamWOptions(1e-3), settings),
       compare<torch::optim::SGD, fsdp::optim::SGD>("SGD", SGDOptions(1e-3), settings),
       compare<torch::optim::SGD, fsdp::optim::SGD>(
           "SGD, momentum", SGDOptions(1e-3).momentum(0.9), settings),
       compare<torch::optim::SGD, fsdp::optim::SGD>(
           "SGD, momentum, decay", SGDOptions(1e-3).momentum(0.9).weight_decay(0.01), settings)});
  if (settings.json) {
    std::cout << rows.dump(2) << "\n";
    return 0;
  }
  std::printf(
      "%d parameters of %ld elements, one thread; microseconds per step\n", settings.params,
      static_cast<long>(settings.numel));
  std::printf("%-22s %10s %10s %8s\n", "", "torch", "fsdp", "ratio");
  for (const auto& row : rows) {
    std::printf(
        "%-22s %10.1f %10.1f %8.1f  [%.1f, %.1f]\n", row["optimizer"].get<std::string>().c_str(),
        row["torch_us"].get<double>(), row["fsdp_us"].get<double>(), row["ratio"].get<double>(),
        row["ratio_low"].get<double>(), row["ratio_high"].get<double>());
  }
}
