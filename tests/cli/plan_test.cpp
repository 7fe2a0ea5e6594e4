// What a run will take: the plan, next to what steps really did.
#include "cli/train/plan.h"

#include <fsdp/checkpoint.h>
#include <fsdp/debug.h>
#include <fsdp/distributed.h>
#include <gtest/gtest.h>
#include <sys/auxv.h>

#include <algorithm>
#include <iostream>
#include <map>

#include "cli/config/presets.h"
#include "cli/files.h"
#include "cli/tiny_config.h"
#include "cli/train/fit.h"
#include "cli/train/free_memory.h"
#include "cli/train/trainer.h"
#include "support/processes.h"
#include "support/tensors.h"

namespace fsdp::cli {
namespace {

using test::contains;

const Corpus& corpus() {
  static const Corpus text(sample_text(1000));
  return text;
}

/// How many, and their bytes in all.
using Traffic = std::map<std::string, std::pair<int64_t, int64_t>>;

/// All that the step of a rank sends.
Traffic traffic_of(Trainer& trainer) {
  CommDebugMode comm;
  trainer.step(0);
  Traffic seen;
  for (const auto& call : comm.calls()) {
    ++seen[call.op].first;
    seen[call.op].second += call.bytes;
  }
  return seen;
}

Traffic traffic_of(const Plan& plan) {
  Traffic planned;
  for (const auto& kind : plan.traffic) {
    auto op = kind.op;
    std::replace(op.begin(), op.end(), '-', '_');
    planned[op].first += kind.count;
    planned[op].second += kind.bytes;
  }
  return planned;
}

void expect_planned(const TrainConfig& config, const std::string& what) {
  const auto& mesh = *config.mesh;
  const auto plan = make_plan(config, mesh);
  run_ranks(static_cast<int>(mesh.ranks()), [&](int rank) {
    Trainer trainer(config, corpus());
    EXPECT_EQ(trainer.num_params(), plan.num_params);
    if (rank == 0) { // the last ranks may have less
      EXPECT_EQ(trainer.shard_bytes(), plan.shard_bytes);
    }
    EXPECT_EQ(traffic_of(trainer), traffic_of(plan)) << what << " on " << mesh.str();
  });
}

TEST(Plan, TrafficIsWhatAStepSends) {
  auto config = tiny_config();
  config.model.dim = 24; // padding, over four ranks of shards
  config.model.hidden = 30;
  for (const auto& mesh : {MeshShape{.shard = 4}, MeshShape{.replicate = 2, .shard = 2}}) {
    config.mesh = mesh;
    expect_planned(config, "plain");
    auto lora = config;
    lora.model.lora = "rank=3";
    expect_planned(lora, "LoRA");
    auto float8 = config;
    float8.float8 = "rowwise";
    expect_planned(float8, "float8");
  }
}

/// How many bytes a rank sends depends on the matrices that it owns.
TEST(Plan, TrafficOfMuonIsAboutWhatAStepSends) {
  auto config = tiny_config();
  config.optimizer = "muon";
  for (const auto& mesh :
       {MeshShape{}, MeshShape{.shard = 4}, MeshShape{.replicate = 2, .shard = 2},
        MeshShape{.shard = 2, .tensor = 2}}) {
    config.mesh = mesh;
    auto planned = traffic_of(make_plan(config, mesh))["all_to_all"];
    run_ranks(static_cast<int>(mesh.ranks()), [&](int) {
      Trainer trainer(config, corpus());
      const auto seen = traffic_of(trainer)["all_to_all"];
      EXPECT_EQ(seen.first, planned.first) << mesh.str();
      EXPECT_GE(10 * seen.second, 9 * planned.second) << mesh.str();
      EXPECT_LE(2 * seen.second, 3 * planned.second) << mesh.str();
    });
  }
}

TEST(Plan, TrafficOfTensorParallelismIsWhatAStepSends) {
  for (const auto& mesh :
       {MeshShape{.tensor = 2}, MeshShape{.shard = 2, .tensor = 2},
        MeshShape{.replicate = 2, .tensor = 2},
        MeshShape{.replicate = 2, .shard = 2, .tensor = 2}}) {
    const auto expect_with = [&](const char* what, auto change) {
      auto config = tiny_config();
      config.mesh = mesh;
      change(config);
      expect_planned(config, what);
    };
    expect_with("plain", [](auto&) {});
    expect_with("norms of queries, biases", [](auto& config) {
      config.model.qk_norm = true;
      config.model.qkv_bias = config.model.o_bias = config.model.mlp_bias = true;
    });
    expect_with("tied", [](auto& config) { config.model.tied = true; });
    expect_with("accumulating", [](auto& config) { config.accumulate = 2; });
    expect_with("checkpointing", [](auto& config) { config.activation_checkpointing = true; });
    expect_with("keeping matmuls", [](auto& config) {
      config.activation_checkpointing = true;
      config.keep_matmuls = "all";
    });
    expect_with("bf16", [](auto& config) { config.param_dtype = "bf16"; });
    expect_with("fp16", [](auto& config) { config.param_dtype = "fp16"; });
    expect_with("bf16 shards", [](auto& config) { config.shard_dtype = "bf16"; });
    expect_with("LoRA", [](auto& config) {
      config.model.qk_norm = true;
      config.model.lora = "rank=4";
    });
    expect_with("LoRA in bf16", [](auto& config) {
      config.model.lora = "rank=3,targets=q_proj+o_proj+up_proj";
      config.param_dtype = "bf16";
      config.accumulate = 2;
    });
    expect_with("float8", [](auto& config) {
      config.float8 = "tensorwise";
      config.param_dtype = "bf16";
    });
    expect_with("sent in bf16", [](auto& config) { config.send_dtype = "bf16"; });
    expect_with("kept after forward", [](auto& config) { config.reshard_after_forward = false; });
    expect_with("not clipped", [](auto& config) { config.clip = 0; });
    expect_with("stepping in backward", [](auto& config) {
      config.clip = 0;
      config.offload = config.step_in_backward = true;
    });
    expect_with("all of it", [](auto& config) {
      config.model.tied = true;
      config.accumulate = 2;
      config.activation_checkpointing = true;
      config.param_dtype = "bf16";
      config.reduce_dtype = "fp32";
    });
  }
}

TEST(Plan, ABudgetKeepsTheFirstBlocksOnTheDevice) {
  TrainConfig config;
  config.model = model_preset("medium");
  config.device = "cuda";
  config.mesh = MeshShape{.shard = 4};
  const auto plain = make_plan(config, *config.mesh);
  EXPECT_EQ(plain.host_state_bytes, 0);
  const auto with = [&](const std::string& budget) {
    auto offloaded = config;
    offloaded.offload = true;
    offloaded.device_budget = budget;
    return make_plan(offloaded, *config.mesh);
  };
  const auto all = with("0");
  EXPECT_EQ(all.state_bytes, 0);
  EXPECT_EQ(all.host_state_bytes, plain.state_bytes);
  EXPECT_EQ(with("1TiB").state_bytes, plain.state_bytes);
  const auto block = 4 * plain.groups.front().shard_bytes; // with gradients and two averages
  const auto part = with(std::to_string(2 * block + 1));
  EXPECT_EQ(part.state_bytes, 2 * block);
  EXPECT_EQ(part.host_state_bytes, plain.state_bytes - 2 * block);
  EXPECT_LT(part.peak_bytes, plain.peak_bytes);
  EXPECT_GT(part.peak_bytes, all.peak_bytes);
  std::vector<bool> on_host(part.groups.size(), true);
  on_host[0] = on_host[1] = false;
  for (size_t i = 0; i < on_host.size(); ++i) {
    EXPECT_EQ(part.groups[i].on_host, on_host[i]) << i;
  }
}

TEST(Plan, WhatDoesNotFitIsRefusedWithWhatWould) {
  const Room room{.host = {int64_t{1} << 30, "in a test"}, .device = {}, .ranks = 4};
  TrainConfig config;
  config.model = model_preset("tiny");
  config.device = "cpu";
  config.mesh = MeshShape{.shard = 4};
  EXPECT_TRUE(judge(config, *config.mesh, {}, room).fits);
  config.batch *= 64;
  const auto wide = judge(config, *config.mesh, {}, room);
  EXPECT_FALSE(wide.fits);
  EXPECT_NE(wide.text.find("1.00 GiB are free in a test; it fits with --a"), std::string::npos)
      << wide.text;
  EXPECT_THROW(check_fit(wide, /*force=*/false), ConfigError);
  check_fit(wide, /*force=*/true);
  config.model = model_preset("70b");
  const auto large = judge(config, *config.mesh, {}, room);
  EXPECT_NE(large.text.find("4 ranks need about "), std::string::npos) << large.text;
  EXPECT_FALSE(large.fits);
}

} // namespace
} // namespace fsdp::cli
