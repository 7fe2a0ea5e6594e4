// `./fsdp bench muon` compares a step of fsdp::optim::Muon on the sharded matrices of a transformer
// with a step of AdamW, and with the usual way: full_tensor(), and the same arithmetic on every
// rank. All take turns over several rounds. Shows the medians of the times, and what is sent.
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "bench_main.h"
#include "measure.h"

namespace {

using Tensors = std::vector<torch::Tensor>;

struct Settings {
  int ranks = 4;
  int64_t layers = 4;
  int64_t dim = 256;
  int rounds = 9;
  std::string dtype = "fp32";
  std::string device = "cpu";
  bool json = false;
};

/// The matrices of the blocks of a Llama.
struct MatricesImpl : torch::nn::Module {
  MatricesImpl(int64_t layers, int64_t dim, torch::Device device) {
    for (int64_t layer = 0; layer < layers; ++layer) {
      for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{
               {dim, dim},
               {dim / 2, dim},
               {dim / 2, dim},
               {dim, dim},
               {3 * dim, dim},
               {3 * dim, dim},
               {dim, 3 * dim}}) {
        register_parameter(
            "m" + std::to_string(parameters().size()), torch::randn({rows, columns}, device));
      }
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto sum = x;
    for (const auto& param : parameters()) {
      sum = sum + (param * param).sum();
    }
    return sum;
  }
};
FSDP_MODULE(Matrices);

/// Gathers every direction and computes its update on every rank.
void step_by_full_tensors(
    const Tensors& params, Tensors& momentum, const fsdp::optim::MuonOptions& options) {
  const torch::NoGradGuard no_grad;
  momentum.resize(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const auto param = fsdp::as_dtensor(params[i]);
    const auto grad = fsdp::as_dtensor_grad(params[i]).to_local();
    momentum[i] = momentum[i].defined() ? momentum[i] : torch::zeros_like(grad);
    momentum[i].lerp_(grad, 1 - options.momentum());
    const auto direction = grad.lerp(momentum[i], options.momentum());
    const auto whole = [&](const torch::Tensor& local) {
      return fsdp::DTensor::from_local(
                 local, param.device_mesh(), param.placements(), param.sizes().vec())
          .full_tensor();
    };
    auto x = whole(direction).to(options.ns_dtype());
    const bool is_tall = x.size(0) > x.size(1);
    x = is_tall ? x.t() : x;
    x = x / x.norm().clamp_min(options.eps());
    const auto [a, b, c] = options.ns_coefficients();
    for (int64_t k = 0; k < options.ns_steps(); ++k) {
      const auto gram = x.mm(x.t());
      x = torch::addmm(x, torch::addmm(gram, gram, gram, b, c), x, a, 1);
    }
    x = is_tall ? x.t().contiguous() : x;
    const std::vector<fsdp::Placement> replicated{fsdp::Replicate{}};
    const auto mine = fsdp::DTensor::from_local(x, param.device_mesh(), replicated)
                          .redistribute(param.placements())
                          .to_local();
    param.to_local().mul_(1 - options.lr() * options.weight_decay());
    param.to_local().sub_(mine, options.lr());
  }
}

struct Row {
  std::vector<double> seconds; // of each round
  int64_t bytes = 0;           // of the collectives of a step on rank 0
  int64_t calls = 0;
};

using Rows = std::map<std::string, Row>;

Rows measure(const Settings& settings) {
  const auto dtype = settings.dtype == "bf16" ? torch::kBFloat16 : torch::kFloat;
  const auto options = fsdp::optim::MuonOptions(1e-3).ns_dtype(dtype);
  Rows rows;
  fsdp::run_ranks(settings.ranks, [&](int rank) {
    Matrices net(settings.layers, settings.dim, torch::Device(settings.device));
    fsdp::fully_shard(net);
    const auto params = net->parameters();
    net(torch::zeros({}, torch::Device(settings.device))).backward();
    fsdp::optim::AdamW adamw(params, 1e-3);
    fsdp::optim::Muon muon(params, options);
    Tensors momentum;
    const std::vector<std::pair<std::string, std::function<void()>>> ways{
        {"AdamW", [&] { adamw.step(); }},
        {"Muon", [&] { muon.step(); }},
        {"Muon by full_tensor()", [&] { step_by_full_tensors(params, momentum, options); }}};
    for (int round = -1; round < settings.rounds; ++round) { // the first one does not count
      for (const auto& [name, step] : ways) {
        fsdp::default_group().barrier();
        fsdp::CommDebugMode comm;
        const auto start = bench::now();
        step();
        if (settings.device != "cpu") {
          torch::cuda::synchronize();
        }
        fsdp::default_group().barrier();
        if (rank == 0 && round >= 0) {
          auto& row = rows[name];
          row.seconds.push_back(bench::now() - start);
          row.calls = comm.total() - 1; // without the barrier
          row.bytes = comm.bytes("all_to_all") + comm.bytes("all_gather");
        }
      }
    }
  });
  return rows;
}

int run(int argc, char** argv) {
  Settings settings;
  CLI::App app("A step of Muon next to AdamW's, and next to gathering every matrix on every rank");
  app.add_option("--ranks", settings.ranks)->capture_default_str();
  app.add_option("--layers", settings.layers)->capture_default_str();
  app.add_option("--dim", settings.dim)->capture_default_str();
  app.add_option("--rounds", settings.rounds)->capture_default_str();
  app.add_option("--dtype", settings.dtype, "of the iteration")
      ->capture_default_str()
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--device", settings.device)->capture_default_str();
  app.add_flag("--json", settings.json);
  CLI11_PARSE(app, argc, argv);
  const auto rows = measure(settings);
  // A rank has to send its shard to the owners and to receive it back, but for its own matrices.
  const auto numel = settings.layers * 12 * settings.dim * settings.dim;
  const auto element = settings.dtype == "bf16" ? 2 : 4;
  const auto bound = 2 * numel / settings.ranks * element;
  const auto base = bench::median(rows.at("AdamW").seconds);
  if (settings.json) {
    nlohmann::json json;
    for (const auto& [name, row] : rows) {
      json[name] = {
          {"seconds", bench::Figure(row.seconds).to_json()},
          {"calls", row.calls},
          {"bytes", row.bytes}};
    }
    json["bound_bytes"] = bound;
    std::cout << json.dump(2) << "\n";
    return 0;
  }
  std::printf(
      "%d ranks, %ld layers of %ld, %.2f M elements, iteration in %s\n", settings.ranks,
      static_cast<long>(settings.layers), static_cast<long>(settings.dim),
      static_cast<double>(numel) * 1e-6, settings.dtype.c_str());
  std::printf(
      "%-24s %10s %16s %12s %14s\n", "", "ms", "[quartiles]", "collectives", "MiB per rank");
  for (const auto& [name, row] : rows) {
    const bench::Figure figure(row.seconds);
    std::printf(
        "%-24s %10.2f   [%5.1f, %5.1f] %12ld %14.2f   %.1f of AdamW\n", name.c_str(),
        figure.median * 1e3, figure.low * 1e3, figure.high * 1e3, static_cast<long>(row.calls),
        static_cast<double>(row.bytes) / (1 << 20), figure.median / base);
  }
  std::printf(
      "A rank's shard there and back is %.2f MiB\n", static_cast<double>(bound) / (1 << 20));
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  return bench::bench_main("bench muon", run, argc, argv);
}
