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

/// The same. Each line is a document.
const Corpus& corpus_of_lines() {
  static const Corpus text = [] {
    Corpus lines(sample_text(1000));
    lines.separate_documents('\n');
    return lines;
  }();
  return text;
}

// ------------------------------------------------------------ Traffic

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
    expect_with("sent in bf16", [](auto& config) { config.send_dtype = "bf16"; });
    expect_with("kept after forward", [](auto& config) { config.reshard_after_forward = false; });
    expect_with("not clipped", [](auto& config) { config.clip = 0; });
    expect_with("all of it", [](auto& config) {
      config.model.tied = true;
      config.accumulate = 2;
      config.activation_checkpointing = true;
      config.param_dtype = "bf16";
      config.reduce_dtype = "fp32";
    });
  }
}

// ------------------------------------------------------------ Memory

struct Case {
  const char* name;
  MeshShape mesh;
  void (*change)(TrainConfig& config);
  bool saves = false;
};

/// The highest peak of a rank, over steps in which the optimizer has its state already.
int64_t measured_peak(const TrainConfig& config, bool saves) {
  std::vector<int64_t> peaks(static_cast<size_t>(config.mesh->ranks()));
  const auto folder = test::temporary_folder();
  run_ranks(static_cast<int>(config.mesh->ranks()), [&](int rank) {
    Trainer trainer(config, config.document_end == "none" ? corpus() : corpus_of_lines());
    for (int64_t step = 0; step < 3; ++step) {
      const auto peak = trainer.step(step).memory.peak;
      if (step >= 2) {
        peaks[rank] = std::max(peaks[rank], peak);
      }
      if (saves) {
        async_save(trainer.state_dict(), folder + "/" + std::to_string(step)).wait();
      }
    }
  });
  return *std::max_element(peaks.begin(), peaks.end());
}

/// An ARM processor without bf16 takes up to a thousand times as long as in fp32.
bool multiplies_16_bits() {
#ifdef __aarch64__
  return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#else
  return true;
#endif
}

/// So that parameters, gradients and their buffers take the most.
void few_tokens(TrainConfig& config) {
  config.context = 8;
  config.batch = 4;
}

void few_tokens_in_bf16(TrainConfig& config) {
  few_tokens(config);
  config.shard_dtype = "bf16";
  config.param_dtype = "bf16";
}

void few_tokens_by_muon(TrainConfig& config) {
  few_tokens(config);
  config.optimizer = "muon";
}

const std::vector<Case> kCases{
    {"one rank", {}, [](TrainConfig&) {}},
    {"one rank, bf16", {}, [](TrainConfig& c) { c.param_dtype = "bf16"; }},
    {"plain", {.shard = 2}, [](TrainConfig&) {}},
    {"plain", {.shard = 4}, [](TrainConfig&) {}},
    {"bf16", {.shard = 2}, [](TrainConfig& c) { c.param_dtype = "bf16"; }},
    {"bf16, reduced in fp32",
     {.shard = 4},
     [](TrainConfig& c) {
       c.param_dtype = "bf16";
       c.reduce_dtype = "fp32";
     }},
    {"fp16", {.shard = 2}, [](TrainConfig& c) { c.param_dtype = "fp16"; }},
    {"reduced in bf16", {.shard = 2}, [](TrainConfig& c) { c.reduce_dtype = "bf16"; }},
    {"accumulating", {.shard = 2}, [](TrainConfig& c) { c.accumulate = 4; }},
    {"accumulating, bf16 reduced in fp32",
     {.shard = 4},
     [](TrainConfig& c) {
       c.param_dtype = "bf16";
       c.reduce_dtype = "fp32";
       c.accumulate = 2;
     }},
    {"accumulating, one rank", {}, [](TrainConfig& c) { c.accumulate = 4; }},
    {"offloaded", {.shard = 2}, [](TrainConfig& c) { c.offload = true; }},
    {"checkpointing", {.shard = 2}, [](TrainConfig& c) { c.activation_checkpointing = true; }},
    {"checkpointing, bf16",
     {.shard = 4},
     [](TrainConfig& c) {
       c.activation_checkpointing = true;
       c.param_dtype = "bf16";
     }},
    {"keeping matmuls",
     {.shard = 2},
     [](TrainConfig& c) {
       c.activation_checkpointing = true;
       c.keep_matmuls = "all";
     }},
    {"keeping matmuls, bf16",
     {.shard = 2},
     [](TrainConfig& c) {
       c.activation_checkpointing = true;
       c.keep_matmuls = "all";
       c.param_dtype = "bf16";
     }},
    {"keeping matmuls, tensor parallel",
     {.shard = 2, .tensor = 2},
     [](TrainConfig& c) {
       c.activation_checkpointing = true;
       c.keep_matmuls = "all";
     }},
    {"keeping 8 MiB of matmuls",
     {.shard = 2},
     [](TrainConfig& c) {
       c.activation_checkpointing = true;
       c.keep_matmuls = "8MiB";
     }},
    {"keeping matmuls that all fit",
     {.shard = 4},
     [](TrainConfig& c) {
       c.activation_checkpointing = true;
       c.keep_matmuls = "1GiB";
     }},
    {"kept after forward", {.shard = 4}, [](TrainConfig& c) { c.reshard_after_forward = false; }},
    {"resharded over two", {.shard = 4}, [](TrainConfig& c) { c.reshard_after_forward = 2; }},
    {"replicas", {.replicate = 2, .shard = 2}, [](TrainConfig&) {}},
    {"tensor parallel", {.shard = 2, .tensor = 2}, [](TrainConfig&) {}},
    {"only tensor parallel", {.tensor = 2}, [](TrainConfig& c) { c.param_dtype = "bf16"; }},
    {"tied", {.shard = 2}, [](TrainConfig& c) { c.model.tied = true; }},
    {"LoRA", {.shard = 2}, [](TrainConfig& c) { c.model.lora = "rank=8"; }},
    {"LoRA, checkpointing",
     {.shard = 4},
     [](TrainConfig& c) {
       c.model.lora = "rank=8";
       c.activation_checkpointing = true;
     }},
    {"LoRA, keeping matmuls",
     {.shard = 2},
     [](TrainConfig& c) {
       c.model.lora = "rank=16";
       c.activation_checkpointing = true;
       c.keep_matmuls = "all";
     }},
    {"LoRA of a high rank", {}, [](TrainConfig& c) { c.model.lora = "rank=128"; }},
    {"capped, keeping matmuls",
     {},
     [](TrainConfig& c) {
       c.model.attention_cap = 50;
       c.activation_checkpointing = true;
       c.keep_matmuls = "all";
     }},
    {"LoRA, bf16, tensor parallel",
     {.shard = 2, .tensor = 2},
     [](TrainConfig& c) {
       c.model.lora = "rank=8";
       c.param_dtype = "bf16";
     }},
    {"LoRA, few tokens",
     {.shard = 4},
     [](TrainConfig& c) {
       few_tokens(c);
       c.model.lora = "rank=8";
     }},
    {"LoRA, few tokens, one rank",
     {},
     [](TrainConfig& c) {
       few_tokens(c);
       c.model.lora = "rank=8";
     }},
    {"LoRA, few tokens, bf16",
     {.shard = 2},
     [](TrainConfig& c) {
       few_tokens(c);
       c.model.lora = "rank=8";
       c.param_dtype = "bf16";
     }},
    {"few tokens", {.shard = 4}, few_tokens},
    {"few tokens, one rank", {}, few_tokens},
    {"few tokens, one rank, bf16",
     {},
     [](TrainConfig& c) {
       few_tokens(c);
       c.param_dtype = "bf16";
     }},
    {"few tokens, bf16 reduced in fp32",
     {.shard = 4},
     [](TrainConfig& c) {
       few_tokens(c);
       c.param_dtype = "bf16";
       c.reduce_dtype = "fp32";
     }},
    {"few tokens, accumulating",
     {.shard = 2},
     [](TrainConfig& c) {
       few_tokens(c);
       c.accumulate = 2;
     }},
    {"few tokens, kept after forward",
     {.shard = 4},
     [](TrainConfig& c) {
       few_tokens(c);
       c.reshard_after_forward = false;
     }},
    {"few tokens, replicas", {.replicate = 2, .shard = 2}, few_tokens},
    {"few tokens, tensor parallel", {.shard = 2, .tensor = 2}, few_tokens},
    {"few tokens, checkpointing, reduced in bf16",
     {.shard = 2},
     [](TrainConfig& c) {
       few_tokens(c);
       c.activation_checkpointing = true;
       c.reduce_dtype = "bf16";
     }},
    {"bf16 shards", {.shard = 2}, few_tokens_in_bf16},
    {"bf16 shards, computed in fp32",
     {.shard = 4},
     [](TrainConfig& c) {
       few_tokens(c);
       c.shard_dtype = "bf16";
     }},
    {"bf16 shards, replicas, reduced in fp32",
     {.replicate = 2, .shard = 2},
     [](TrainConfig& c) {
       few_tokens_in_bf16(c);
       c.reduce_dtype = "fp32";
     }},
    {"bf16 shards, 8-bit moments",
     {.shard = 2},
     [](TrainConfig& c) {
       few_tokens_in_bf16(c);
       c.moments = "8bit";
     }},
    {"sent in bf16",
     {.shard = 4},
     [](TrainConfig& c) {
       few_tokens(c);
       c.send_dtype = "bf16";
     }},
    {"8-bit moments",
     {.shard = 2},
     [](TrainConfig& c) {
       few_tokens(c);
       c.moments = "8bit";
     }},
    {"wide", {.shard = 2}, [](TrainConfig& c) { c.model.hidden = 1408; }},
    {"wide, bf16, checkpointing",
     {.shard = 2},
     [](TrainConfig& c) {
       c.model.hidden = 1408;
       c.param_dtype = "bf16";
       c.activation_checkpointing = true;
     }},
    {"wide, accumulating",
     {.shard = 4},
     [](TrainConfig& c) {
       c.model.hidden = 1408;
       c.accumulate = 8;
     }},
    {"large vocabulary", {.shard = 2}, [](TrainConfig& c) { c.model.vocab = 4096; }},
    {"large vocabulary, tp",
     {.shard = 2, .tensor = 2},
     [](TrainConfig& c) { c.model.vocab = 4096; }},
    {"like Qwen3",
     {.shard = 2},
     [](TrainConfig& c) {
       c.model.qk_norm = true;
       c.model.head_size = 64;
       c.model.tied = true;
     }},
    {"like Qwen3, tp",
     {.shard = 2, .tensor = 2},
     [](TrainConfig& c) {
       c.model.qk_norm = true;
       c.model.qkv_bias = true;
     }},
    {"like Gemma",
     {.shard = 2},
     [](TrainConfig& c) {
       c.model.gemma = true;
       c.model.head_size = 48;
     }},
    {"like Gemma 2",
     {.shard = 2},
     [](TrainConfig& c) {
       c.model.gemma = c.model.sandwich_norms = true;
       c.model.window = 32;
       c.model.full_every = 2;
       c.model.attention_cap = 50;
       c.model.score_cap = 30;
     }},
    {"like Gemma 2, tp, checkpointing",
     {.shard = 2, .tensor = 2},
     [](TrainConfig& c) {
       c.model.gemma = c.model.sandwich_norms = true;
       c.model.attention_cap = 50;
       c.activation_checkpointing = true;
     }},
    {"like Gemma 2, long rows",
     {.shard = 2},
     [](TrainConfig& c) {
       c.model.gemma = c.model.sandwich_norms = true;
       c.model.attention_cap = 50;
       c.activation_checkpointing = true;
       c.context = 900;
       c.batch = 2;
     }},
    {"like Gemma 3",
     {.shard = 2},
     [](TrainConfig& c) {
       c.model.gemma = c.model.sandwich_norms = c.model.qk_norm = true;
       c.model.window = 32;
       c.model.full_every = 3;
     }},
    {"biases and a window",
     {.shard = 4},
     [](TrainConfig& c) {
       c.model.qkv_bias = c.model.o_bias = c.model.mlp_bias = true;
       c.model.window = 32;
     }},
    {"window, long rows",
     {.shard = 2},
     [](TrainConfig& c) {
       c.model.window = 32;
       c.context = 900;
       c.batch = 2;
     }},
    {"windows of some blocks, long rows, checkpointing",
     {.shard = 2},
     [](TrainConfig& c) {
       c.model.window = 32;
       c.model.full_every = 2;
       c.activation_checkpointing = true;
       c.context = 900;
       c.batch = 2;
     }},
    {"documents",
     {.shard = 2},
     [](TrainConfig& c) {
       c.document_end = "10";
       c.context = 300;
       c.batch = 8;
     }},
    {"documents and windows, bf16, checkpointing",
     {.shard = 2},
     [](TrainConfig& c) {
       c.document_end = "10";
       c.model.window = 32;
       c.model.full_every = 2;
       c.param_dtype = "bf16";
       c.activation_checkpointing = true;
       c.context = 300;
       c.batch = 8;
     }},
    {"muon", {.shard = 4}, [](TrainConfig& c) { c.optimizer = "muon"; }},
    {"few tokens, muon", {.shard = 2}, few_tokens_by_muon},
    {"few tokens, muon, one rank", {}, few_tokens_by_muon},
    {"few tokens, muon, replicas", {.replicate = 2, .shard = 2}, few_tokens_by_muon},
    {"few tokens, muon, tensor parallel", {.shard = 2, .tensor = 2}, few_tokens_by_muon},
    {"few tokens, muon, square, one rank",
     {},
     [](TrainConfig& c) {
       few_tokens_by_muon(c);
       c.model.hidden = 128;
     }},
    {"saving, muon", {.shard = 2}, [](TrainConfig& c) { c.optimizer = "muon"; }, true},
    {"saving", {.shard = 2}, [](TrainConfig&) {}, true},
    {"saving, 8-bit moments",
     {.shard = 2},
     [](TrainConfig& c) {
       few_tokens(c);
       c.moments = "8bit";
     },
     true},
    {"saving, replicas", {.replicate = 2, .shard = 2}, [](TrainConfig&) {}, true},
};

// Prints a table.
TEST(PlannedPeak, IsWhatStepsTake) {
  for (const auto& [name, mesh, change, saves] : kCases) {
    TrainConfig config;
    config.model = model_preset("tiny");
    config.mesh = mesh;
    config.schedule.lr = 1e-4;
    change(config);
    if (config.param_dtype != "fp32" && !multiplies_16_bits()) {
      std::cout << name << ": would take too long here" << std::endl;
      continue;
    }
    const auto planned = make_plan(config, mesh, {.saves = saves}).peak_bytes;
    const auto measured = measured_peak(config, saves);
    const auto ratio = static_cast<double>(planned) / static_cast<double>(measured);
    std::cout << c10::str(
                     mesh.str(), " ", name, ": planned ", planned, ", measured ", measured,
                     ", ratio ", ratio)
              << std::endl;
    EXPECT_GE(ratio, 0.95) << name;
    EXPECT_LE(ratio, 1.12) << name; // LoRA in bf16 with tensor parallelism takes less than planned
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

// ------------------------------------------------------------ Free memory

/// A folder with proc and sys of a machine that has 8 MiB available.
std::string small_machine(const std::string& groups) {
  const auto root = test::temporary_folder();
  const auto write = [&](const std::string& path, const std::string& text) {
    make_folders(std::filesystem::path(root + path).parent_path());
    write_file(root + path, text);
  };
  write("/proc/meminfo", "MemTotal:       16384 kB\nMemFree: 1 kB\nMemAvailable:    8192 kB\n");
  write("/proc/self/cgroup", groups);
  write("/sys/fs/cgroup/job/memory.max", "6000000\n");
  write("/sys/fs/cgroup/job/memory.current", "4000000\n");
  write("/sys/fs/cgroup/job/memory.stat", "anon 3000000\ninactive_file 1000000\n");
  write("/sys/fs/cgroup/job/step/memory.max", "max\n");
  write("/sys/fs/cgroup/job/step/memory.current", "1000\n");
  write("/sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "5000000\n");
  write("/sys/fs/cgroup/memory/docker/memory.usage_in_bytes", "3000000\n");
  write("/sys/fs/cgroup/memory/docker/memory.stat", "total_inactive_file 500000\n");
  return root;
}

TEST(FreeMemory, IsTheLeastOfMachineAndControlGroups) {
  const auto free = [](const std::string& groups) {
    return free_host_memory(small_machine(groups));
  };
  EXPECT_EQ(free("0::/\n").bytes, 8192 << 10);
  EXPECT_EQ(free("0::/\n").limit, "in this machine's memory");
  EXPECT_EQ(free("0::/job/step\n").bytes, 3000000); // the limit of a group above
  EXPECT_NE(free("0::/job/step\n").limit.find("control group"), std::string::npos);
  EXPECT_EQ(free("5:cpu,cpuacct:/x\n4:memory:/docker\n0::/\n").bytes, 2500000);
  EXPECT_EQ(free("").bytes, 8192 << 10);
}

} // namespace
} // namespace fsdp::cli
