// What `fsdp train` is made of: model and loop.
#include "cli/train/trainer.h"

#include <ATen/CPUGeneratorImpl.h>

#include <fsdp/debug.h>
#include <fsdp/distributed.h>
#include <fsdp/error.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>

#include "cli/check.h"
#include "cli/tiny_config.h"
#include "cli/train/plan.h"
#include "cli/train/progress.h"
#include "support/processes.h"
#include "support/tensors.h"

namespace fsdp::cli {
namespace {

using test::contains;
using test::message_of;

// ------------------------------------------------------------ Model

Transformer make_model(const ModelDims& dims) {
  Transformer model(dims);
  init_weights(model, 5);
  return model;
}

TEST(Transformer, TheSeedAloneDecidesTheWeights) {
  const auto dims = tiny_config().model;
  const auto one = make_model(dims)->named_parameters();
  torch::rand(3); // torch's own generator has no part in it
  for (const auto& item : make_model(dims)->named_parameters()) {
    EXPECT_SAME(item.value(), one[item.key()]);
  }
}

TEST(Transformer, WeightsHaveTheirSizes) {
  ModelDims dims{.dim = 128, .layers = 8, .heads = 4, .kv_heads = 2, .hidden = 352, .tied = false};
  const auto params = make_model(dims)->named_parameters();
  const auto std_of = [&](const std::string& name) { return params[name].std().item<double>(); };
  EXPECT_NEAR(std_of("embed_tokens.weight"), 0.02, 0.001);
  EXPECT_NEAR(std_of("lm_head.weight"), 0.02, 0.001);
  EXPECT_NEAR(std_of("layers.0.self_attn.q_proj.weight"), 0.02, 0.001);
  EXPECT_NEAR(std_of("layers.7.self_attn.o_proj.weight"), 0.005, 0.0003);
  EXPECT_NEAR(std_of("layers.7.mlp.down_proj.weight"), 0.005, 0.0003);
  EXPECT_TRUE(params["norm.weight"].eq(1).all().item<bool>());
  EXPECT_EQ(params["layers.0.self_attn.k_proj.weight"].size(0), 64);
  dims.tied = true;
  EXPECT_EQ(make_model(dims)->named_parameters().find("lm_head.weight"), nullptr);
}

TEST(Transformer, LooksAtThePastAlone) {
  const torch::NoGradGuard no_grad;
  auto model = make_model(tiny_config().model);
  const auto tokens = torch::arange(1, 11).unsqueeze(0);
  auto changed = tokens.clone();
  changed[0][6] = 99;
  const auto before = model(tokens);
  const auto after = model(changed);
  EXPECT_EQ(before.sizes(), (std::vector<int64_t>{1, 10, 256}));
  EXPECT_CLOSE(after.slice(1, 0, 6), before.slice(1, 0, 6));
  EXPECT_FALSE(torch::allclose(after.slice(1, 6, 7), before.slice(1, 6, 7)));
  EXPECT_FALSE(torch::allclose(after.slice(1, 9, 10), before.slice(1, 9, 10)));
}

TEST(Transformer, KnowsTheOrderOfTheTokens) {
  const torch::NoGradGuard no_grad;
  auto model = make_model({.dim = 16, .layers = 1, .heads = 2, .kv_heads = 2, .hidden = 32});
  const auto last = [&](std::vector<int64_t> tokens) {
    return model(torch::tensor(tokens).unsqueeze(0)).select(1, -1);
  };
  EXPECT_FALSE(torch::allclose(last({3, 4, 5}), last({4, 3, 5}), 1e-7, 1e-9));
}

TEST(Attention, SharedKeysAndValuesAreRepeatedOnes) {
  const torch::NoGradGuard no_grad;
  ModelDims dims{.dim = 16, .heads = 4, .kv_heads = 2};
  Attention shared(dims);
  dims.kv_heads = 4;
  Attention repeated(dims);
  const auto repeat = [](const torch::Tensor& weight) { // rows of each head, twice
    return weight.view({2, 1, 4, 16}).expand({2, 2, 4, 16}).reshape({16, 16});
  };
  repeated->q_proj->weight.copy_(shared->q_proj->weight);
  repeated->k_proj->weight.copy_(repeat(shared->k_proj->weight));
  repeated->v_proj->weight.copy_(repeat(shared->v_proj->weight));
  repeated->o_proj->weight.copy_(shared->o_proj->weight);
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(1);
  const auto x = torch::randn({2, 5, 16}, generator);
  const auto rotary = torch::randn({2, 5, 2}, generator);
  EXPECT_CLOSE(shared(x, rotary, torch::Tensor()), repeated(x, rotary, torch::Tensor()));
}

// ------------------------------------------------------------ Loop

/// The losses of a run's steps, and its validation loss.
std::vector<double> losses(const TrainConfig& config, int ranks) {
  const Corpus corpus(sample_text());
  std::vector<double> result;
  run_ranks(ranks, [&](int rank) {
    Trainer trainer(config, corpus);
    std::vector<double> mine;
    for (int64_t step = 0; step < config.steps; ++step) {
      mine.push_back(trainer.step(step).loss);
    }
    mine.push_back(trainer.validation_loss());
    if (rank == 0) {
      result = mine;
    }
  });
  return result;
}

TEST(Trainer, SameSeedGivesTheSameBits) {
  const auto config = tiny_config();
  auto other = config;
  other.seed = 2;
  for (const int ranks : {1, 4}) {
    SCOPED_TRACE_OF(ranks);
    const auto first = losses(config, ranks);
    EXPECT_LT(first.back(), first.front() - 1);
    EXPECT_EQ(losses(config, ranks), first);
    EXPECT_NE(losses(other, ranks), first);
  }
}

TEST(Trainer, AnyNumberOfRanksGivesTheSameLosses) {
  auto config = tiny_config();
  for (const bool tied : {true, false}) {
    SCOPED_TRACE_OF(tied);
    config.model.tied = tied;
    const auto alone = losses(config, 1);
    for (const int ranks : {2, 4, 8}) {
      const auto together = losses(config, ranks);
      for (size_t i = 0; i < alone.size(); ++i) {
        EXPECT_NEAR(together[i], alone[i], 1e-4) << ranks << " ranks, step " << i + 1;
      }
    }
  }
}

TEST(Trainer, ReshardingAfterForwardChangesNoBit) {
  auto config = tiny_config();
  const auto automatic = losses(config, 2);
  for (const bool reshard : {true, false}) {
    SCOPED_TRACE_OF(reshard);
    config.reshard_after_forward = reshard;
    EXPECT_EQ(losses(config, 2), automatic);
  }
}

/// Within 1e-4 of one rank's, for any arrangement of the same run.
void expect_close(const TrainConfig& config, int ranks, const std::vector<double>& expected) {
  const auto others = losses(config, ranks);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(others[i], expected[i], 1e-4)
        << config.mesh.value_or(MeshShape{}).str() << ", step " << i + 1;
  }
}

TEST(Trainer, AnyMeshGivesTheSameLosses) {
  auto config = tiny_config();
  config.steps = 6;
  for (const bool tied : {false, true}) {
    SCOPED_TRACE_OF(tied);
    config.model.tied = tied;
    config.mesh.reset();
    const auto alone = losses(config, 1);
    for (const auto& mesh :
         {MeshShape{.replicate = 2, .shard = 2}, MeshShape{.replicate = 2, .shard = 1},
          MeshShape{.shard = 1, .tensor = 2}, MeshShape{.shard = 2, .tensor = 2},
          MeshShape{.replicate = 2, .shard = 2, .tensor = 2}}) {
      config.mesh = mesh;
      expect_close(config, static_cast<int>(mesh.ranks()), alone);
    }
  }
}

TEST(Trainer, MuonGivesTheSameLossesOnAnyMesh) {
  auto config = tiny_config();
  config.batch = 12;
  config.steps = 6;
  const auto by_adamw = losses(config, 1);
  config.optimizer = "muon";
  const auto alone = losses(config, 1);
  EXPECT_LT(alone.back(), alone.front() - 0.5);
  EXPECT_NE(alone, by_adamw);
  for (const auto& mesh :
       {MeshShape{.shard = 3}, MeshShape{.replicate = 2, .shard = 2},
        MeshShape{.shard = 2, .tensor = 2}, MeshShape{.replicate = 3, .shard = 2, .tensor = 2}}) {
    config.mesh = mesh;
    expect_close(config, static_cast<int>(mesh.ranks()), alone);
  }
}

TEST(Trainer, WhatSavesMemoryDoesNotChangeTheLosses) {
  auto config = tiny_config();
  config.steps = 6;
  const auto plain = losses(config, 2);
  auto other = config;
  other.activation_checkpointing = true;
  for (const auto* keep : {"none", "all", "100KiB"}) {
    other.keep_matmuls = keep;
    EXPECT_EQ(losses(other, 2), plain) << keep;
  }
  other = config;
  other.offload = true;
  EXPECT_EQ(losses(other, 2), plain);
  other = config;
  other.accumulate = 4;
  expect_close(other, 2, plain);
  other = config;
  other.reshard_after_forward = 2;
  expect_close(other, 4, plain);
}

/// The results of a run's steps, on rank 0.
std::vector<StepResult> results(const TrainConfig& config, int ranks) {
  const Corpus corpus(sample_text());
  std::vector<StepResult> all;
  run_ranks(ranks, [&](int rank) {
    Trainer trainer(config, corpus);
    for (int64_t step = 0; step < config.steps; ++step) {
      const auto result = trainer.step(step);
      if (rank == 0) {
        all.push_back(result);
      }
    }
  });
  return all;
}

TEST(Trainer, StepsInBackwardAsAfterIt) {
  auto config = tiny_config();
  config.steps = 5;
  config.clip = 0;
  for (const auto& mesh :
       {MeshShape{.shard = 2}, MeshShape{.replicate = 2, .shard = 2},
        MeshShape{.shard = 2, .tensor = 2}}) {
    for (const int64_t accumulate : {1, 2}) {
      config.mesh = mesh;
      config.accumulate = accumulate;
      const auto ranks = static_cast<int>(mesh.ranks());
      const auto plain = results(config, ranks);
      for (const bool low_precision : {false, true}) {
        SCOPED_TRACE_OF(mesh.str(), accumulate, low_precision);
        auto after = config;
        after.moments = low_precision ? "8bit" : "fp32";
        auto inside = after;
        inside.offload = inside.step_in_backward = true;
        inside.device_budget = "200KiB";
        const auto expected = low_precision ? results(after, ranks) : plain;
        const auto actual = results(inside, ranks);
        ASSERT_EQ(actual.size(), expected.size());
        for (size_t i = 0; i < actual.size(); ++i) {
          EXPECT_EQ(actual[i].loss, expected[i].loss) << i;
          EXPECT_EQ(actual[i].lr, expected[i].lr) << i;
          EXPECT_NEAR(actual[i].grad_norm, expected[i].grad_norm, 1e-5 * expected[i].grad_norm);
        }
      }
    }
  }
}

TEST(Trainer, LearnsInLowPrecision) {
  auto config = tiny_config();
  for (const auto* dtype : {"bf16", "fp16"}) { // in fp16 the first steps may be skipped
    config.param_dtype = dtype;
    config.reduce_dtype = "fp32";
    const auto all = losses(config, 2);
    EXPECT_LT(all.back(), all.front() - 0.5) << dtype;
  }
}

TEST(Trainer, LowPrecisionGivesNearlyTheSameLosses) {
  const auto config = tiny_config();
  const auto plain = losses(config, 2);
  const auto expect_near = [&](const char* what, int ranks, auto change) {
    auto other = config;
    change(other);
    const auto all = losses(other, ranks);
    ASSERT_EQ(all.size(), plain.size());
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_NEAR(all[i], plain[i], 0.02 * plain[i]) << what << ", step " << i;
    }
  };
  expect_near("bf16 shards", 2, [](auto& c) { c.shard_dtype = "bf16"; });
  expect_near("8-bit moments", 2, [](auto& c) { c.moments = "8bit"; });
  expect_near("sent in bf16", 4, [](auto& c) { c.send_dtype = "bf16"; });
  expect_near("float8", 2, [](auto& c) { c.float8 = "tensorwise"; });
  expect_near("float8, a scale for each row", 4, [](auto& c) { c.float8 = "rowwise"; });
  expect_near("all of it, with replicas and tensor parallelism", 8, [](auto& c) {
    c.shard_dtype = "bf16";
    c.moments = "8bit";
    c.send_dtype = "bf16";
    c.float8 = "rowwise";
    c.mesh = MeshShape{.replicate = 2, .shard = 2, .tensor = 2};
  });
  expect_near("offloaded", 2, [](auto& c) {
    c.shard_dtype = "bf16";
    c.offload = true;
  });
}

TEST(Trainer, NamesTheFirstParameterThatIsNotFinite) {
  const auto config = tiny_config();
  const Corpus corpus(sample_text());
  run_ranks(2, [&](int) {
    Trainer trainer(config, corpus);
    trainer.step(2);
    const auto state = trainer.state_dict(); // the live shards
    const torch::NoGradGuard no_grad;
    const auto& weight =
        std::get<DTensor>(state.at("model.layers.1.mlp.up_proj.weight")).to_local();
    weight.fill_(std::numeric_limits<float>::quiet_NaN());
    const torch::AutoGradMode with_grad(true);
    const auto message = message_of<NonFiniteError>([&] { trainer.step(3); });
    EXPECT_TRUE(
        contains(message, "the first parameter that is not finite is layers.1.mlp.up_proj"));
    EXPECT_TRUE(contains(message, "in step 4; "));
  });
}

TEST(Trainer, StopsAtAGradientThatIsNotFinite) {
  const Corpus corpus(sample_text());
  run_ranks(2, [&](int) {
    Trainer trainer(tiny_config(), corpus);
    trainer.step(2);
    const auto fill = [state = trainer.state_dict()](const std::string& name, double value) {
      const torch::NoGradGuard no_grad;
      std::get<DTensor>(state.at("model.layers.1.mlp." + name + ".weight")).to_local().fill_(value);
    };
    fill("gate_proj", 1e30); // the gradient of up_proj has the product of these two
    fill("down_proj", 1e30);
    fill("up_proj", 0); // so the loss is finite
    const auto message = message_of<NonFiniteError>([&] { trainer.step(3); });
    EXPECT_TRUE(contains(message, "the first gradient that is not finite is that of "));
    EXPECT_TRUE(contains(message, "in step 4; "));
  });
}

TEST(Trainer, GeneratesTextThatTheSeedDecides) {
  const auto config = tiny_config();
  const Corpus corpus(sample_text());
  std::vector<std::string> texts;
  run_ranks(2, [&](int rank) {
    Trainer trainer(config, corpus);
    for (int i = 0; i < 2; ++i) {
      const auto text = trainer.generate("for (", 30); // longer than the context
      if (rank == 0) {
        texts.push_back(text);
      }
    }
  });
  EXPECT_EQ(texts[0].size(), 35u);
  EXPECT_EQ(texts[0].substr(0, 5), "for (");
  EXPECT_EQ(texts[0], texts[1]);
}

TEST(Trainer, EveryRankStopsWhenTheLossIsNotFinite) {
  auto config = tiny_config();
  config.schedule.lr = 1e30;
  config.clip = 0;
  const Corpus corpus(sample_text());
  for (const bool in_backward : {false, true}) {
    config.step_in_backward = in_backward;
    std::atomic<int> stopped = 0;
    run_ranks(2, [&](int) {
      Trainer trainer(config, corpus);
      const auto message = message_of<NonFiniteError>([&] {
        for (int64_t step = 0; step < config.steps; ++step) {
          trainer.step(step);
        }
      });
      stopped += contains(message, "try a smaller --lr") ? 1 : 0;
    });
    EXPECT_EQ(stopped, 2) << in_backward;
  }
}

TEST(LearningRate, RisesThenFallsToATenth) {
  TrainConfig config;
  config.steps = 100;
  config.schedule.lr = 1;
  EXPECT_DOUBLE_EQ(learning_rate(config, 0), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(config, 9), 1);
  EXPECT_DOUBLE_EQ(learning_rate(config, 10), 1);
  EXPECT_NEAR(learning_rate(config, 55), 0.55, 1e-9);
  EXPECT_NEAR(learning_rate(config, 99), 0.1, 1e-3);
  config.steps = 1;
  EXPECT_DOUBLE_EQ(learning_rate(config, 0), 1);
}

TEST(LearningRate, LinearConstantAndByHand) {
  const Schedule linear{.kind = "linear", .lr = 1, .min_lr = 0, .warmup = 0};
  EXPECT_DOUBLE_EQ(learning_rate(linear, 0, 10), 1);
  EXPECT_DOUBLE_EQ(learning_rate(linear, 5, 10), 0.5);
  const Schedule constant{.kind = "constant", .lr = 1, .warmup = 4};
  EXPECT_DOUBLE_EQ(learning_rate(constant, 1, 10), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(constant, 9, 10), 1);
}

TEST(Progress, TheLeastImportantPiecesGoFirst) {
  const std::vector<LinePiece> pieces{
      {"step 1"}, {" ####", 3}, {" loss 2"}, {" norm", 1}, {" x", 2}};
  EXPECT_EQ(join_fitting(pieces, 25), "step 1 #### loss 2 norm x");
  EXPECT_EQ(join_fitting(pieces, 24), "step 1 loss 2 norm x");
  EXPECT_EQ(join_fitting(pieces, 19), "step 1 loss 2 norm");
  EXPECT_EQ(join_fitting(pieces, 3), "step 1 loss 2");
  EXPECT_EQ(join_fitting({}, 3), "");
}

TEST(Progress, NumbersAndTextForPeople) {
  EXPECT_EQ(binary_size(1000), "1000 B");
  EXPECT_EQ(binary_size(1536 * 1024), "1.50 MiB");
  EXPECT_EQ(decimal_count(38'768'161, "B"), "38.8 MB");
  EXPECT_EQ(printable("a\tb\n\x1b[1m\xff"), "a\tb\n?[1m?");
}

} // namespace
} // namespace fsdp::cli
