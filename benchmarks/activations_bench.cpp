// `./fsdp bench activations` prints a table: the memory and the time of forward and backward of a
// transformer, by what it keeps of its blocks until backward. The ways take turns over several
// rounds.
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "bench_main.h"
#include "measure.h"
#include "transformer.h"

namespace {

struct Settings {
  bench::TransformerOptions model{.dim = 256, .layers = 8, .heads = 8};
  int64_t batch = 4;
  int64_t sequence = 256;
  int rounds = 7;
  std::string device = "cpu";
  bool bf16 = false;
};

struct Way {
  std::string name;
  std::optional<fsdp::ActivationCheckpointOptions> recompute = {}; // of each block
  bench::Transformer net = nullptr;
  std::vector<double> seconds = {};
  int64_t peak = 0; // beyond the parameters and gradients
};

void measure(Way& way, const Settings& settings, const bench::Batch& batch, bool counts) {
  const torch::Device device(settings.device);
  const auto synchronize = [&] {
    if (!device.is_cpu()) {
      torch::cuda::synchronize();
    }
  };
  fsdp::reset_peak_memory_stats(device);
  const auto before = fsdp::memory_stats(device).allocated;
  synchronize();
  const auto start = bench::now();
  bench::loss_of(way.net, batch).backward();
  synchronize();
  if (counts) {
    way.seconds.push_back(bench::now() - start);
    way.peak = std::max(way.peak, fsdp::memory_stats(device).peak - before);
  }
}

int run(int argc, char** argv) {
  Settings settings;
  CLI::App app("Memory and time of activation checkpointing");
  app.add_option("--dim", settings.model.dim)->capture_default_str();
  app.add_option("--layers", settings.model.layers)->capture_default_str();
  app.add_option("--heads", settings.model.heads)->capture_default_str();
  app.add_option("--batch", settings.batch)->capture_default_str();
  app.add_option("--sequence", settings.sequence)->capture_default_str();
  app.add_option("--rounds", settings.rounds)->capture_default_str();
  app.add_option("--device", settings.device)->capture_default_str();
  app.add_flag("--bf16", settings.bf16, "train in bf16");
  CLI11_PARSE(app, argc, argv);

  const torch::Device device(settings.device);
  (void)fsdp::memory_stats(device); // counting begins
  const auto tokens = settings.batch * settings.sequence;
  // What save_matmuls keeps of a block: six results of the width of the model, and two that are
  // four times as wide.
  const auto matmuls = settings.model.layers * tokens * settings.model.dim * 14 *
                       static_cast<int64_t>(settings.bf16 ? 2 : 4);
  using Options = fsdp::ActivationCheckpointOptions;
  const auto saving = [](auto policy) { return Options{.save = policy}; };
  std::vector<Way> ways{
      {"all (no checkpointing)"},
      {"save_matmuls()", saving(fsdp::save_matmuls())},
      {"save_within(half of those)", saving(fsdp::save_within(matmuls / 2))},
      {"save_within(a quarter)", saving(fsdp::save_within(matmuls / 4))},
      {"inputs of blocks (full)", Options{}}};
  bench::Batch batch(settings.batch, settings.sequence, settings.model.vocabulary);
  batch.tokens = batch.tokens.to(device);
  batch.targets = batch.targets.to(device);
  for (auto& way : ways) {
    way.net = bench::Transformer(settings.model);
    bench::fill_parameters(*way.net);
    way.net->to(device, settings.bf16 ? torch::kBFloat16 : torch::kFloat);
    for (auto& block : way.net->blocks) {
      if (way.recompute) {
        fsdp::apply_activation_checkpointing(block, *way.recompute);
      }
    }
  }
  for (int round = -2; round < settings.rounds; ++round) { // two to warm up, and to learn
    for (auto& way : ways) {
      measure(way, settings, batch, round >= 0);
    }
  }
  std::printf(
      "%ld blocks of width %ld, %ld tokens, %s on %s\n", static_cast<long>(settings.model.layers),
      static_cast<long>(settings.model.dim), static_cast<long>(tokens),
      settings.bf16 ? "bf16" : "fp32", settings.device.c_str());
  std::printf(
      "%-28s %8s %8s %10s %16s %8s\n", "kept until backward", "MiB", "ratio", "ms", "[quartiles]",
      "ratio");
  const auto& all = ways.front();
  for (const auto& way : ways) {
    const bench::Figure figure(way.seconds);
    std::printf(
        "%-28s %8.1f %8.2f %10.1f   [%5.0f, %5.0f] %8.2f\n", way.name.c_str(),
        static_cast<double>(way.peak) / (1 << 20),
        static_cast<double>(way.peak) / static_cast<double>(all.peak), figure.median * 1e3,
        figure.low * 1e3, figure.high * 1e3, figure.median / bench::median(all.seconds));
  }
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  return bench::bench_main("bench activations", run, argc, argv);
}
