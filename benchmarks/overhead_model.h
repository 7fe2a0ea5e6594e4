#pragma once

#include <fsdp/debug.h>
#include <fsdp/optim.h>

#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "measure.h"
#include "transformer.h"

// The C++ side of `./fsdp bench overhead`.

namespace bench {

struct Options {
  TransformerOptions model;
  int64_t sequence = 16;
  int world_size = 8;
  int64_t min_shard_numel = 0; // for form e
  int rounds = 11;
  int steps = 20;
  std::string dtype = "fp32";
  std::string optimizer = "adamw";
  std::string clock = "wall";
  std::string python = FSDP_BENCH_PYTHON;
  std::string script = FSDP_BENCH_DIR "/overhead.py";

  clockid_t clock_id() const {
    return clock == "cpu" ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
  }
  bool is_bf16() const {
    return dtype == "bf16";
  }
};

/// The parts of a step that are timed. A new part must be added here, to Model::time and
/// to overhead.py.
enum Part { Step, ForwardBackward, Optimizer, kParts };
constexpr const char* kPartNames[] = {"step", "forward_backward", "optimizer"};

/// Seconds per step for each part.
using Times = std::array<double, kParts>;

/// What one step computed and communicated.
struct Checked {
  double loss = 0;
  double grad_norm = 0; // of this rank's shards
  int64_t all_gathers = 0;
  int64_t reduce_scatters = 0;
  int64_t all_reduces = 0;
};

/// Which parameters are sharded: none, all, or those with at least `min_shard_numel`
/// elements.
enum class Sharding { None, Full, LargeOnly };

class Model {
 public:
  Model(const Options& options, Sharding sharding)
      : net_(options.model),
        clock_(options.clock_id()),
        batch_(/*size=*/1, options.sequence, options.model.vocabulary) {
    fill_parameters(*net_);
    for (const auto& item : net_->named_parameters()) {
      shapes_[item.key()] = item.value().sizes().vec();
    }
    if (sharding != Sharding::None) {
      fsdp::FullyShardOptions how{
          .mesh = fsdp::init_device_mesh(torch::kCPU, {options.world_size}, {"dp"}),
          .reshard_after_forward = true,
          .min_shard_numel = sharding == Sharding::LargeOnly ? options.min_shard_numel : 0};
      if (options.is_bf16()) {
        how.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
      }
      shard(net_, how);
    } else if (options.is_bf16()) {
      net_->to(torch::kBFloat16); // so that the plain and the sharded form compute the same
    }
    parameters_ = net_->parameters();
    if (options.optimizer == "adamw") {
      optimizer_ = std::make_unique<fsdp::optim::AdamW>(parameters_, kLearningRate);
    }
  }

  torch::Tensor forward_backward() {
    auto loss = loss_of(net_, batch_);
    loss.backward();
    return loss;
  }

  /// Runs the optimizer's step and drops the gradients.
  void finish() {
    if (optimizer_) {
      optimizer_->step();
      optimizer_->zero_grad();
    } else {
      for (auto& parameter : parameters_) {
        parameter.mutable_grad() = torch::Tensor();
      }
    }
  }

  void step() {
    forward_backward();
    finish();
  }

  /// Returns medians over the steps. One more step before them warms up.
  Times time(int steps) {
    std::array<std::vector<double>, kParts> times;
    step();
    for (int i = 0; i < steps; ++i) {
      const auto start = now(clock_);
      forward_backward();
      const auto middle = now(clock_);
      finish();
      const auto end = now(clock_);
      times[Step].push_back(end - start);
      times[ForwardBackward].push_back(middle - start);
      times[Optimizer].push_back(end - middle);
    }
    Times result;
    for (int part = 0; part < kParts; ++part) {
      result[part] = median(times[part]);
    }
    return result;
  }

  Checked check() {
    Checked result;
    {
      fsdp::CommDebugMode comm;
      result.loss = forward_backward().item<double>();
      result.all_gathers = comm.count("all_gather");
      result.reduce_scatters = comm.count("reduce_scatter");
      result.all_reduces = comm.count("all_reduce");
    }
    double square = 0;
    for (const auto& parameter : parameters_) {
      square += parameter.grad().to(torch::kDouble).square().sum().item<double>();
    }
    result.grad_norm = std::sqrt(square);
    finish();
    return result;
  }

  int64_t groups() const {
    const auto modules = net_->modules();
    return std::count_if(modules.begin(), modules.end(), [](const auto& module) {
      return fsdp::is_fsdp_module(*module);
    });
  }
  /// The shapes of the whole parameters, by name.
  const std::map<std::string, std::vector<int64_t>>& shapes() const {
    return shapes_;
  }
  /// Elements of one rank's shard of a block, padding included.
  int64_t block_shard_numel(int64_t world_size) const {
    int64_t numel = 0;
    for (const auto& [name, sizes] : shapes_) {
      if (name.starts_with("block0.")) {
        const auto rows = (sizes[0] + world_size - 1) / world_size;
        numel += rows * c10::multiply_integers(sizes) / sizes[0];
      }
    }
    return numel;
  }

 private:
  static constexpr double kLearningRate = 1e-5; // so small that values neither grow nor vanish

  Transformer net_;
  const clockid_t clock_;
  const Batch batch_;
  std::map<std::string, std::vector<int64_t>> shapes_;
  std::vector<torch::Tensor> parameters_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

} // namespace bench
