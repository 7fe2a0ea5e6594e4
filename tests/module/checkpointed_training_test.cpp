// Activation checkpointing inside and outside of sharded modules, next to the
// unsharded model that is not checkpointed.
#include <fsdp/memory.h>
#include <fsdp/optim.h>

#include "module/biases_only.h"
#include "state/order_fixture.h"

namespace fsdp {
namespace {

using namespace test;
using torch::Tensor;

enum class Applied : std::uint8_t { AtTheCall, BeforeSharding, AfterSharding, ToAll };
const std::vector<Applied> kApplied{
    Applied::AtTheCall, Applied::BeforeSharding, Applied::AfterSharding, Applied::ToAll};

ModelArgs small_args(Applied applied, bool weight_tying = true) {
  return {
      .n_layers = 3,
      .dropout_p = 0,
      .weight_tying = weight_tying,
      .checkpoint_activations = applied == Applied::AtTheCall};
}

/// Of the blocks, by `shard` into groups; or of all that has a forward.
template <class Shard>
void checkpoint_and_shard(Transformer& net, Applied applied, Shard shard) {
  const auto apply = [&net] {
    apply_activation_checkpointing(net, [](const std::string&, torch::nn::Module& module) {
      return module.as<TransformerBlock>() != nullptr;
    });
  };
  if (applied == Applied::BeforeSharding) {
    apply();
  }
  shard(net);
  if (applied == Applied::AfterSharding) {
    apply();
  } else if (applied == Applied::ToAll) { // modules in modules, the root and its children
    apply_activation_checkpointing(net, [](const std::string&, torch::nn::Module& module) {
      const auto* hookable = dynamic_cast<Hookable*>(&module);
      return hookable && hookable->fsdp_has_forward();
    });
  }
}

// ------------------------------------------------------------ Parity

TEST(CheckpointedTraining, BlocksAsGroups) {
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [n](int) {
      for (const auto applied : kApplied) {
        for (const auto& reshard : reshards(n)) {
          SCOPED_TRACE_OF(applied, reshard);
          auto net = seeded<Transformer>(small_args(applied));
          auto reference = seeded<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0});
          checkpoint_and_shard(net, applied, [&](Transformer& each) {
            shard_transformer(each, {.reshard_after_forward = reshard});
          });
          train_and_compare(net, reference, transformer_loss, 3);
        }
      }
    });
  }
}

TEST(CheckpointedTraining, GroupsThatSaveMemory) {
  run_ranks(2, [](int) {
    for (const auto applied : kApplied) {
      for (const bool reshard : {true, false}) {
        SCOPED_TRACE_OF(applied, reshard);
        const FullyShardOptions options{.reshard_after_forward = reshard};
        auto net = seeded<Transformer>(small_args(applied, /*weight_tying=*/false));
        auto reference =
            seeded<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0, .weight_tying = false});
        checkpoint_and_shard(net, applied, [&](Transformer& each) {
          fully_shard(each->blocks[0], options);
          fully_shard({each->blocks[1], each->blocks[2]}, options);
          fully_shard({each->tok_embeddings, each->pos_embeddings}, options)
              .set_unshard_in_backward(false);
          fully_shard({each->norm, each->output}, options);
          fully_shard(each, options);
        });
        train_and_compare(net, reference, transformer_loss, 3);
        CommDebugMode comm;
        auto loss = transformer_loss(net, 0);
        EXPECT_EQ(comm.count("all_gather"), 4);
        comm.clear();
        loss.backward();
        // Backward does not need the embeddings, but to recompute them does.
        EXPECT_EQ(comm.count("all_gather"), reshard ? (applied == Applied::ToAll ? 4 : 3) : 0);
        EXPECT_EQ(comm.count("reduce_scatter"), 4);
      }
    }
  });
}

/// Trains a Transformer of groups that `shard` makes, checkpointed in every way.
template <class Shard, class Loss>
void expect_trains(int num_ranks, Shard shard, Loss loss_of, int steps) {
  run_ranks(num_ranks, [&](int) {
    for (const auto applied : kApplied) {
      for (const bool reshard : {true, false}) {
        SCOPED_TRACE_OF(applied, reshard);
        auto net = seeded<Transformer>(small_args(applied));
        auto reference = seeded<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0});
        checkpoint_and_shard(net, applied, [&](Transformer& each) {
          shard(each, FullyShardOptions{.reshard_after_forward = reshard});
        });
        train_and_compare(net, reference, loss_of, steps);
      }
    }
  });
}

TEST(CheckpointedTraining, TiedWeightsInAGroupOfTheirOwn) {
  const auto shard = [](Transformer& net, const FullyShardOptions& options) {
    fully_shard({net->tok_embeddings, net->output}, options);
    shard_transformer(net, options);
  };
  for (const int n : {2, 4}) {
    expect_trains(n, shard, transformer_loss, 3);
  }
}

// Two forwards, and one backward that frees what the recomputation of the other
// needs.
TEST(CheckpointedTraining, TwoForwardsOfNestedGroupsThenOneBackward) {
  const auto shard = [](Transformer& net, const FullyShardOptions& options) {
    for (auto& block : net->blocks) {
      fully_shard(block->attention, options);
      fully_shard(block->feed_forward, options);
    }
    shard_transformer(net, options);
  };
  const auto loss = [](Transformer& net, int step) {
    return (transformer_loss(net, step) - 2 * transformer_loss(net, step + 50)).pow(2);
  };
  for (const int n : {1, 2}) {
    expect_trains(n, shard, loss, 2);
  }
}

TEST(CheckpointedTraining, OnlyBiasesTrainableAndOnlyTheyAreReduced) {
  for (const int n : {2, 4}) {
    run_ranks(n, [](int) {
      for (const auto& reshard : reshards(2)) {
        for (const bool freeze_after : {false, true}) {
          train_biases_only(
              reshard, freeze_after, [](MLP& mlp) { apply_activation_checkpointing(mlp); });
        }
      }
    });
  }
}

struct LoraImpl : torch::nn::Module {
  explicit LoraImpl(int64_t dim)
      : base(register_module("base", linear(dim, dim))),
        a(register_module("a", linear(dim, 2, false))),
        b(register_module("b", linear(2, dim, false))) {
    for (const auto& param : base->parameters()) {
      param.set_requires_grad(false);
    }
  }
  Tensor forward(const Tensor& x) {
    return torch::tanh(base(x) + b(a(x)));
  }
  Linear base, a, b;
};
FSDP_MODULE(Lora);

/// Calls its parts more than once.
struct TwiceImpl : torch::nn::Module {
  TwiceImpl() : one(register_module("one", Lora(8))), two(register_module("two", MLP(8))) {}
  Tensor forward(const Tensor& x) {
    const auto both = [this](const Tensor& t) { return two(one(one(t))) + one(two(t)); };
    switch (regions) {
      case 1:
        return run(both, both(x));
      case 2:
        return run([this, both](const Tensor& t) { return run(both, both(t)); }, x);
      default:
        return run(two, run(one, run(one, x)));
    }
  }
  template <class F>
  Tensor run(F f, const Tensor& x) {
    return checkpointed ? checkpoint(f, x) : f(x);
  }
  Lora one;
  MLP two;
  bool checkpointed = false;
  int regions = 1; // one, one inside of another, or one per call
};
FSDP_MODULE(Twice);

TEST(CheckpointedTraining, ModulesThatAreCalledMoreThanOnce) {
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [n](int) {
      for (const int regions : {1, 2, 3}) {
        for (const bool for_good : {false, true}) {
          for (const auto& reshard : reshards(n)) {
            SCOPED_TRACE_OF(regions, for_good, reshard);
            auto [net, reference] = twins<Twice>();
            net->regions = reference->regions = regions;
            net->checkpointed = true;
            if (for_good) {
              apply_activation_checkpointing(net->one);
              apply_activation_checkpointing(net->two);
            }
            fully_shard(net->one, {.reshard_after_forward = reshard});
            fully_shard(net->two, {.reshard_after_forward = reshard});
            fully_shard(net, {.reshard_after_forward = reshard});
            train_and_compare(
                net, reference,
                [](Twice& each, int step) { return each(random_batch(step, {3, 8})).sum(); }, 2);
          }
        }
      }
    });
  }
}

// The outermost call, with a batch that needs no gradient, and the root's own
// parameters used in it.
TEST(CheckpointedTraining, OfTheRootItself) {
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [n](int) {
      for (const auto& reshard : reshards(n)) {
        SCOPED_TRACE_OF(reshard);
        auto [net, reference] = twins<Transformer>(ModelArgs{.dropout_p = 0});
        shard_transformer(net, {.reshard_after_forward = reshard});
        train_and_compare(
            net, reference,
            [&](Transformer& each, int step) {
              const auto tokens = random_tokens(step, {2, 16}, 8);
              const auto head = [&each](const Tensor& t) { return each(t).exp().sum(); };
              return each.get() == net.get() ? checkpoint(head, tokens) : head(tokens);
            },
            3);
      }
    });
  }
}

// ------------------------------------------------------------ Precision

struct SeenImpl : torch::nn::Module {
  SeenImpl() : lin(register_module("lin", linear(4, 4))) {}
  Tensor forward(const Tensor& x) {
    inputs.push_back(x.scalar_type());
    return lin(x);
  }
  Linear lin;
  std::vector<at::ScalarType> inputs;
};
FSDP_MODULE(Seen);

TEST(CheckpointedTraining, RecomputationCastsInputsAndOutputs) {
  run_ranks(2, [](int) {
    const std::vector twice_bf16{torch::kBFloat16, torch::kBFloat16};
    const ActivationCheckpointOptions whole{.early_stop = false};
    auto inputs = seeded<Seen>();
    fully_shard(inputs, {.mp_policy = {.param_dtype = torch::kBFloat16}});
    checkpoint(whole, inputs, random_batch(0, {2, 4}).set_requires_grad(true)).sum().backward();
    EXPECT_EQ(inputs->inputs, twice_bf16);

    auto net = seeded<Seen>();
    fully_shard(
        net, {.mp_policy = {
                  .param_dtype = torch::kBFloat16,
                  .output_dtype = torch::kFloat,
                  .cast_forward_inputs = false}});
    std::vector<at::ScalarType> outputs;
    const auto x = random_batch(0, {2, 4}).to(torch::kBFloat16).set_requires_grad(true);
    checkpoint(
        whole,
        [&](const Tensor& t) {
          const auto y = net(t);
          outputs.push_back(y.scalar_type());
          return y;
        },
        x)
        .sum()
        .backward();
    EXPECT_EQ(outputs, (std::vector{torch::kFloat, torch::kFloat}));
    EXPECT_EQ(net->inputs, twice_bf16);
  });
}

TEST(CheckpointedTraining, MixedPrecisionAndOffloadToTheBit) {
  run_ranks(2, [](int) {
    for (const auto applied : kApplied) {
      for (const bool offload : {true, false}) {
        SCOPED_TRACE_OF(applied, offload);
        FullyShardOptions options{
            .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}};
        if (offload) {
          options.offload_policy = CPUOffloadPolicy{.pin_memory = false};
        }
        auto net = seeded<Transformer>(small_args(applied));
        auto plain = seeded<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0});
        checkpoint_and_shard(
            net, applied, [&](Transformer& each) { shard_transformer(each, options); });
        shard_transformer(plain, options);
        transformer_loss(net, 0).backward();
        transformer_loss(plain, 0).backward();
        const auto expected = plain->named_parameters();
        for (const auto& item : net->named_parameters()) {
          EXPECT_SAME(item.value().grad(), expected[item.key()].grad());
        }
      }
    }
  });
}

// ------------------------------------------------------------ Dropout

/// Scales with its input: without biases, every part does.
struct ScalesImpl : torch::nn::Module {
  ScalesImpl() {
    for (int i = 0; i < 3; ++i) {
      layers.push_back(register_module(std::to_string(i), linear(16, 16, false)));
    }
  }
  Tensor forward(Tensor x) {
    for (auto& layer : layers) {
      x = torch::dropout(torch::relu(layer(torch::dropout(x, 0.3, is_training()))), 0.5, true);
    }
    return x;
  }
  std::vector<Linear> layers;
};
FSDP_MODULE(Scales);

TEST(CheckpointedTraining, DropoutRepeatsOnEveryRank) {
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [](int) {
      auto net = seeded<Scales>();
      apply_activation_checkpointing(net->layers[1]);
      for (auto& layer : net->layers) {
        fully_shard(layer);
      }
      fully_shard(net);
      for (int step = 0; step < 10; ++step) {
        const auto x = random_batch(step, {8, 16}).set_requires_grad(true);
        const auto y = checkpoint(net, checkpoint(net, x)).sum();
        y.backward();
        // Euler: the gradient of what scales, times its input, is itself. Not so
        // with other masks.
        EXPECT_TRUE(near((x.grad() * x).sum().detach(), y.detach(), 1e-4));
      }
    });
  }
}

// ------------------------------------------------------------ Memory

TEST(CheckpointedTraining, PeaksLower) {
  run_ranks(2, [](int) {
    memory_stats(torch::kCPU);
    const auto peak = [](Flavour flavour) {
      const auto before = memory_stats(torch::kCPU).allocated;
      int64_t high = 0;
      {
        auto net = make_transformer(6, true, true, flavour);
        for (int step = 0; step < 2; ++step) {
          reset_peak_memory_stats(torch::kCPU);
          net(random_tokens(step, {256, 16}, 8)).sum().backward();
          high = memory_stats(torch::kCPU).peak - before;
          const auto stats = memory_stats(torch::kCPU);
          // Of the graph nothing is left: shards, gradients, and small things.
          EXPECT_LE(stats.other, before + 64 * 1024);
          EXPECT_EQ(stats.gathered, 0);
        }
      }
      EXPECT_LE(memory_stats(torch::kCPU).allocated, before + 64 * 1024);
      return high;
    };
    const auto without = peak(Flavour::None);
    EXPECT_LT(peak(Flavour::AtTheCall), without / 3);
    EXPECT_LT(peak(Flavour::ForGood), without / 3);
  });
}

} // namespace
} // namespace fsdp
