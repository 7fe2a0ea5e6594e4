// `./fsdp bench low_precision` prints two tables. The first compares a step of LowPrecisionAdamW
// with one of AdamW in fp32, in time and memory. The second compares ways to reduce gradients over
// ranks that are threads, in time and error. The ways take turns over several rounds.
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench_main.h"
#include "measure.h"

namespace {

using Tensors = std::vector<torch::Tensor>;

struct Settings {
  int ranks = 4;
  int64_t params = 16;
  int64_t numel = 1 << 20;
  int rounds = 9;
  std::string device = "cpu";

  torch::TensorOptions options(torch::Dtype dtype) const {
    return torch::TensorOptions(torch::Device(device)).dtype(dtype);
  }
  void synchronize() const {
    if (device != "cpu") {
      torch::cuda::synchronize();
    }
  }
};

// ------------------------------------------------------------ Optimizers

struct Way {
  std::string name;
  double bytes; // of an element: parameter and moments
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<double> seconds = {};
};

Tensors make_params(const Settings& settings, torch::Dtype dtype) {
  Tensors params;
  for (int64_t i = 0; i < settings.params; ++i) {
    params.push_back(torch::randn({settings.numel}, settings.options(dtype)));
    params.back().set_requires_grad(true).mutable_grad() = torch::randn_like(params.back());
  }
  return params;
}

void compare_optimizers(const Settings& settings) {
  using fsdp::optim::LowPrecisionAdamWOptions;
  const auto low = [&](torch::Dtype dtype, torch::Dtype moments, bool stochastic) {
    return std::make_unique<fsdp::optim::LowPrecisionAdamW>(
        make_params(settings, dtype),
        LowPrecisionAdamWOptions().moments(moments).stochastic_rounding(stochastic));
  };
  const auto k8bit = torch::kFloat8_e4m3fn;
  const double scaled = 1 + 4.0 / 256;
  std::vector<Way> ways;
  ways.push_back(
      {"AdamW, all in fp32", 12,
       std::make_unique<fsdp::optim::AdamW>(make_params(settings, torch::kFloat))});
  ways.push_back({"fp32, moments in 8 bits", 4 + 2 * scaled, low(torch::kFloat, k8bit, true)});
  ways.push_back({"bf16, moments in fp32", 10, low(torch::kBFloat16, torch::kFloat, true)});
  ways.push_back({"bf16, moments in bf16", 6, low(torch::kBFloat16, torch::kBFloat16, true)});
  ways.push_back({"the same, to the nearest", 6, low(torch::kBFloat16, torch::kBFloat16, false)});
  ways.push_back({"bf16, moments in 8 bits", 2 + 2 * scaled, low(torch::kBFloat16, k8bit, true)});
  for (int round = -1; round < settings.rounds; ++round) { // the first one does not count
    for (auto& way : ways) {
      settings.synchronize();
      const auto start = bench::now();
      way.optimizer->step();
      settings.synchronize();
      if (round >= 0) {
        way.seconds.push_back(bench::now() - start);
      }
    }
  }
  std::printf(
      "%ld parameters of %ld elements on %s\n", static_cast<long>(settings.params),
      static_cast<long>(settings.numel), settings.device.c_str());
  std::printf(
      "%-26s %10s %16s %12s %18s\n", "", "ms", "[quartiles]", "of AdamW", "bytes/parameter");
  const auto base = bench::median(ways[0].seconds);
  for (const auto& way : ways) {
    const bench::Figure figure(way.seconds);
    std::printf(
        "%-26s %10.2f   [%5.1f, %5.1f] %12.2f %18.2f\n", way.name.c_str(), figure.median * 1e3,
        figure.low * 1e3, figure.high * 1e3, figure.median / base, way.bytes);
  }
}

// ------------------------------------------------------------ Reductions

struct Reduction {
  std::string name;
  torch::Dtype dtype; // that gradients are added in
  int sent_bytes;     // of an element
  std::shared_ptr<fsdp::ReduceScatter> reduce = {};
  std::vector<double> seconds = {};
  // Roots of the mean squares, relative to those of the sums.
  double bf16_error = 0; // for gradients as a model in bf16 has them
  double fp32_error = 0;
};

torch::Tensor reduced(const Reduction& way, const torch::Tensor& in, fsdp::ProcessGroup& group) {
  auto out = torch::empty({in.numel() / group.size()}, in.options());
  if (way.reduce) {
    (*way.reduce)(out, in, group, fsdp::ReduceOp::Sum, /*async_op=*/true).wait();
  } else {
    group.reduce_scatter(out, in);
  }
  return out;
}

double error_of(const Reduction& way, const torch::Tensor& grads, fsdp::ProcessGroup& group) {
  const auto exact = reduced({"", torch::kDouble, 8}, grads.to(torch::kDouble), group);
  const auto error = reduced(way, grads.to(way.dtype), group) - exact;
  return (error.square().mean() / exact.square().mean()).sqrt().item<double>();
}

void compare_reductions(const Settings& settings) {
  std::vector<Reduction> ways{
      {"fp32", torch::kFloat, 4},
      {"bf16", torch::kBFloat16, 2},
      {"sent in bf16, added in fp32", torch::kFloat, 2,
       std::make_shared<fsdp::WideSumReduceScatter>()}};
  fsdp::run_ranks(settings.ranks, [&](int rank) {
    auto group = fsdp::default_group();
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(rank));
    const auto grads = torch::randn({settings.numel * settings.ranks}, generator)
                           .to(torch::Device(settings.device));
    for (auto& way : ways) {
      const auto bf16_error = error_of(way, grads.to(torch::kBFloat16).to(torch::kFloat), group);
      const auto fp32_error = error_of(way, grads, group);
      if (rank == 0) {
        way.bf16_error = bf16_error;
        way.fp32_error = fp32_error;
      }
    }
    for (int round = -1; round < settings.rounds; ++round) {
      for (auto& way : ways) {
        const auto in = grads.to(way.dtype);
        settings.synchronize();
        group.barrier();
        const auto start = bench::now();
        reduced(way, in, group);
        settings.synchronize();
        group.barrier();
        if (rank == 0 && round >= 0) {
          way.seconds.push_back(bench::now() - start);
        }
      }
    }
  });
  std::printf(
      "\n%d ranks, %ld elements for each\n", settings.ranks, static_cast<long>(settings.numel));
  std::printf(
      "%-30s %10s %16s %14s %14s %12s\n", "", "ms", "[quartiles]", "error in bf16", "in fp32",
      "bytes sent");
  for (const auto& way : ways) {
    const bench::Figure figure(way.seconds);
    std::printf(
        "%-30s %10.2f   [%5.1f, %5.1f] %14.1e %14.1e %12d\n", way.name.c_str(), figure.median * 1e3,
        figure.low * 1e3, figure.high * 1e3, way.bf16_error, way.fp32_error, way.sent_bytes);
  }
}

int run(int argc, char** argv) {
  Settings settings;
  CLI::App app("Low precision: steps of AdamW, and reductions of gradients");
  app.add_option("--ranks", settings.ranks, "of the reductions")->capture_default_str();
  app.add_option("--params", settings.params, "of the optimizers")->capture_default_str();
  app.add_option("--numel", settings.numel, "elements of each, and for each rank")
      ->capture_default_str();
  app.add_option("--rounds", settings.rounds)->capture_default_str();
  app.add_option("--device", settings.device)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  compare_optimizers(settings);
  compare_reductions(settings);
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  return bench::bench_main("bench low_precision", run, argc, argv);
}
