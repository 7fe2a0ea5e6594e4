// `./fsdp bench experts` trains stacked weights of experts, {experts, rows, columns}, that are
// sharded along dim 0, along dim 1, or by the rows of all experts (BlockShard). With few experts
// and many ranks, dim 0 leaves ranks without a shard, and dim 1 takes copies that reorder. All take
// turns over several rounds. Each round is a forward and backward over a few tokens.
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>

#include <cstdio>
#include <string>
#include <vector>

#include "bench_main.h"
#include "measure.h"

namespace {

struct Settings {
  int ranks = 4;
  int64_t experts = 2;
  int64_t layers = 4;
  int64_t dim = 256;
  int64_t tokens = 16;
  int rounds = 15;
  std::string device = "cpu";
};

struct ExpertsImpl : torch::nn::Module {
  explicit ExpertsImpl(const Settings& settings) {
    const auto [experts, dim] = std::pair(settings.experts, settings.dim);
    const auto device = torch::Device(settings.device);
    up = register_parameter("up", torch::randn({experts, dim, 4 * dim}, device) * 0.02);
    down = register_parameter("down", torch::randn({experts, 4 * dim, dim}, device) * 0.02);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return x + x.matmul(up).relu().matmul(down).sum(0);
  }
  torch::Tensor up, down;
};
FSDP_MODULE(Experts);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Settings& settings) {
    for (int64_t i = 0; i < settings.layers; ++i) {
      layers.push_back(register_module(std::to_string(i), Experts(settings)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) {
      x = layer(x);
    }
    return x;
  }
  std::vector<Experts> layers;
};
FSDP_MODULE(Net);

struct Way {
  std::string name;
  fsdp::ShardPlacement placement;
  std::vector<double> seconds = {}; // of each round
  int64_t shard_bytes = 0;          // with padding
  int64_t peak = 0;                 // beyond the shards, on rank 0
};

void measure(std::vector<Way>& ways, const Settings& settings) {
  fsdp::run_ranks(settings.ranks, [&](int rank) {
    const torch::Device device(settings.device);
    fsdp::memory_stats(device); // begins to count
    std::vector<Net> nets;
    for (auto& way : ways) {
      nets.emplace_back(settings);
      const fsdp::FullyShardOptions options{
          .shard_placement_fn = [&](const auto&, const auto&) { return way.placement; }};
      for (auto& layer : nets.back()->layers) {
        fsdp::fully_shard(layer, options);
      }
      fsdp::fully_shard(nets.back());
      if (rank == 0) {
        way.shard_bytes = 0;
        for (const auto& group : fsdp::sharding_plan(nets.back()).groups) {
          way.shard_bytes += group.shard_bytes;
        }
      }
    }
    const auto x = torch::ones({settings.tokens, settings.dim}, device);
    for (int round = -2; round < settings.rounds; ++round) { // the first two do not count
      for (size_t i = 0; i < ways.size(); ++i) {
        fsdp::default_group().barrier();
        fsdp::reset_peak_memory_stats(device);
        const auto before = fsdp::memory_stats(device).allocated;
        const auto start = bench::now();
        nets[i](x).sum().backward();
        if (!device.is_cpu()) {
          torch::cuda::synchronize();
        }
        fsdp::default_group().barrier();
        if (rank == 0 && round >= 0) {
          ways[i].seconds.push_back(bench::now() - start);
          ways[i].peak = fsdp::memory_stats(device).peak - before;
        }
        nets[i]->zero_grad();
      }
    }
  });
}

int run(int argc, char** argv) {
  Settings settings;
  CLI::App app("Ways to shard the stacked weights of experts");
  app.add_option("--ranks", settings.ranks)->capture_default_str();
  app.add_option("--experts", settings.experts)->capture_default_str();
  app.add_option("--layers", settings.layers)->capture_default_str();
  app.add_option("--dim", settings.dim)->capture_default_str();
  app.add_option("--tokens", settings.tokens)->capture_default_str();
  app.add_option("--rounds", settings.rounds)->capture_default_str();
  app.add_option("--device", settings.device)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  std::vector<Way> ways{
      {"Shard{1}", fsdp::Shard{1}},
      {"Shard{0}", fsdp::Shard{0}},
      {"BlockShard{2}", fsdp::BlockShard{2}}};
  measure(ways, settings);
  std::printf(
      "%d ranks, %ld layers of %ld experts of width %ld, %ld tokens, fp32 on %s\n", settings.ranks,
      static_cast<long>(settings.layers), static_cast<long>(settings.experts),
      static_cast<long>(settings.dim), static_cast<long>(settings.tokens), settings.device.c_str());
  std::printf(
      "%-16s %10s %16s %8s %20s %16s\n", "", "ms", "[quartiles]", "ratio", "MiB of a shard",
      "MiB at the peak");
  for (const auto& way : ways) {
    const bench::Figure figure(way.seconds);
    std::printf(
        "%-16s %10.1f   [%5.1f, %5.1f] %8.2f %20.2f %16.2f\n", way.name.c_str(),
        figure.median * 1e3, figure.low * 1e3, figure.high * 1e3,
        figure.median / bench::median(ways.front().seconds),
        static_cast<double>(way.shard_bytes) / (1 << 20),
        static_cast<double>(way.peak) / (1 << 20));
  }
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  return bench::bench_main("bench experts", run, argc, argv);
}
