// What a recomputation does to sharded modules in the middle of backward: where it
// ends, when it fails, and in which order groups are gathered.
#include "state/order_fixture.h"

namespace fsdp {
namespace {

using namespace test;
using torch::Tensor;

// ------------------------------------------------------------ Stops

/// Two outputs, of which backward may ask for one.
struct ForkImpl : torch::nn::Module {
  ForkImpl() : left(register_module("left", MLP(8))), right(register_module("right", MLP(8))) {}
  std::pair<Tensor, Tensor> forward(const Tensor& x) {
    const auto both = [this](const Tensor& t) { return std::pair(left(t), right(t)); };
    return checkpointed ? checkpoint(both, x) : both(x);
  }
  MLP left, right;
  bool checkpointed = false;
};
FSDP_MODULE(Fork);

// The recomputation ends inside of `right`, which nobody has gathered for
// backward.
TEST(Recomputation, AStopInsideAModuleThatIsNotInBackward) {
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [n](int) {
      for (const auto& reshard : reshards(n)) {
        SCOPED_TRACE_OF(reshard);
        auto [net, reference] = twins<Fork>();
        auto left = fully_shard(net->left, {.reshard_after_forward = reshard});
        auto right = fully_shard(net->right, {.reshard_after_forward = reshard});
        auto root = fully_shard(net, {.reshard_after_forward = reshard});
        net->checkpointed = true;
        train_and_compare(net, reference, [](Fork& each, int step) {
          const auto [a, b] = each(random_batch(step, {3, 8}));
          return step % 2 == 0 ? a.sum() : b.sum();
        });
        EXPECT_FALSE(left.is_unsharded() || right.is_unsharded());
        // Both, one after the other.
        root.set_is_last_backward(false);
        const auto [a, b] = net(random_batch(9, {3, 8}));
        a.sum().backward({}, /*retain_graph=*/true);
        root.set_is_last_backward(true);
        b.sum().backward();
        const auto [c, d] = reference(random_batch(9, {3, 8}));
        (c.sum() + d.sum()).backward();
        average_gradients(*reference);
        expect_parity(*net, *reference);
      }
    });
  }
}

// ------------------------------------------------------------ Exceptions

struct FailsImpl : torch::nn::Module {
  FailsImpl() : mlp(register_module("mlp", MLP(6))) {}
  Tensor forward(const Tensor& x) {
    TORCH_CHECK(!fail || !again, "as asked");
    const auto y = mlp(x);
    again = true;
    TORCH_CHECK(!fail_late || calls++ == 0, "as asked");
    return y.sin();
  }
  MLP mlp;
  bool fail = false, fail_late = false, again = false;
  int calls = 0;
};
FSDP_MODULE(Fails);

struct FailingImpl : torch::nn::Module {
  FailingImpl() {
    for (int i = 0; i < 3; ++i) {
      parts.push_back(register_module(std::to_string(i), Fails()));
    }
  }
  Tensor forward(Tensor x) {
    for (auto& part : parts) {
      x = x + part(x);
    }
    return x;
  }
  std::vector<Fails> parts;
};
FSDP_MODULE(Failing);

TEST(Recomputation, AnExceptionInRecomputationLeavesAllUsable) {
  for (const int n : {1, 2}) {
    run_ranks(n, [](int) {
      for (const auto flavour : {Flavour::AtTheCall, Flavour::ForGood}) {
        for (const bool late : {false, true}) {
          auto [net, reference] = twins<Failing>();
          for (auto& part : net->parts) {
            if (flavour == Flavour::ForGood) {
              apply_activation_checkpointing(part, {.early_stop = false});
            }
            fully_shard(part->mlp);
            fully_shard(part);
          }
          fully_shard(net);
          const auto loss_of = [&](Failing& each, int step) {
            const auto x = random_batch(step, {4, 6});
            return flavour == Flavour::AtTheCall && each.get() == net.get()
                       ? checkpoint({.early_stop = false}, each, x).sum()
                       : each(x).sum();
          };
          for (const size_t which : {0, 1, 2}) {
            SCOPED_TRACE_OF(flavour, late, which);
            auto& part = net->parts[which];
            auto loss = loss_of(net, 0);
            (late ? part->fail_late : part->fail) = true;
            part->again = true;
            part->calls = 1;
            const auto message = message_of<c10::Error>([&] { loss.backward(); });
            EXPECT_TRUE(contains(message, "as asked"));
            EXPECT_TRUE(contains(message, "when backward recomputed"));
            part->fail = part->fail_late = false;
            net->zero_grad(); // of what had been reduced by then
            train_and_compare(net, reference, loss_of, 1);
          }
        }
      }
    });
  }
}

TEST(Recomputation, ErrorsNameTheModuleFromTheRoot) {
  run_ranks(2, [](int) {
    auto net = seeded<Failing>();
    for (auto& part : net->parts) {
      apply_activation_checkpointing(part);
      fully_shard(part);
    }
    fully_shard(net);
    auto loss = net(random_batch(0, {4, 6})).sum();
    net->parts[1]->fail = true;
    EXPECT_TRUE(contains(
        message_of<c10::Error>([&] { loss.backward(); }),
        "when backward recomputed '1' (fsdp::(anonymous namespace)::FailsImpl)"));
  });
}

// ------------------------------------------------------------ Order

// FSDP2's test_set_modules_to_backward_prefetch_inside_ac: blocks are
// checkpointed, and their feed-forward parts again.
TEST(Recomputation, PrefetchOfGroupsInsideOfCheckpointedBlocks) {
  run_ranks(4, [](int) {
    auto net = seeded<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0, .weight_tying = false});
    apply_activation_checkpointing(net, [](const std::string&, torch::nn::Module& module) {
      return module.as<TransformerBlock>() || module.as<FeedForward>();
    });
    auto embeddings = fully_shard({net->tok_embeddings, net->pos_embeddings});
    std::vector<FSDPModule> blocks, w1;
    for (auto& block : net->blocks) {
      w1.push_back(fully_shard(block->feed_forward->w1));
      blocks.push_back(fully_shard(block));
    }
    auto output = fully_shard({net->norm, net->output}, {.reshard_after_forward = true});
    fully_shard(net);
    const auto backward = [&] {
      auto loss = loss_of(net);
      EventLog log;
      loss.backward();
      auto lines = short_form(log, "UR");
      for (auto& line : lines) {
        const auto replace = [&line](const std::string& from, const std::string& to) {
          if (const auto at = line.find(from); at != std::string::npos) {
            line.replace(at, from.size(), to);
          }
        };
        replace("tok_embeddings, pos_embeddings", "E");
        replace("norm, output", "O");
        for (const std::string i : {"0", "1", "2"}) {
          replace("layers." + i + ".feed_forward.w1", "W" + i);
          replace("layers." + i, "L" + i);
        }
      }
      return lines;
    };
    const Lines by_default{"U O b",  "U L2 b", "R O p",  "U W2 b", "U L1 b", "R W2 p",
                           "R L2 p", "U W1 b", "U L0 b", "R W1 p", "R L1 p", "U W0 b",
                           "U E b",  "R W0 p", "R L0 p", "R E p"};
    EXPECT_EQ(backward(), by_default);
    EXPECT_EQ(backward(), by_default);
    output.set_modules_to_backward_prefetch({blocks[2]});
    blocks[2].set_modules_to_backward_prefetch({blocks[1], w1[1]});
    blocks[1].set_modules_to_backward_prefetch({blocks[0], w1[0]});
    blocks[0].set_modules_to_backward_prefetch({embeddings});
    const Lines as_told{"U O b",  "U L2 b", "R O p",  "U L1 b", "U W1 b", "U W2 f",
                        "R W2 p", "R L2 p", "U L0 b", "U W0 b", "R W1 p", "R L1 p",
                        "U E b",  "R W0 p", "R L0 p", "R E p"};
    EXPECT_EQ(backward(), as_told);
    EXPECT_EQ(backward(), as_told);
  });
}

// ------------------------------------------------------------ What backward does not need

struct SquareEmbeddingImpl : torch::nn::Module {
  SquareEmbeddingImpl() : table(register_module("table", Embedding(8, 4))) {}
  torch::Tensor forward(const torch::Tensor& tokens) {
    return table(tokens).pow(2);
  }
  Embedding table;
};
FSDP_MODULE(SquareEmbedding);

struct EmbeddingNetImpl : torch::nn::Module {
  EmbeddingNetImpl()
      : first(register_module("first", SquareEmbedding())),
        last(register_module("last", linear(4, 4))) {}
  torch::Tensor forward(const torch::Tensor& tokens) {
    return last(first(tokens));
  }
  SquareEmbedding first;
  Linear last;
};
FSDP_MODULE(EmbeddingNet);

// Backward alone does not need the table, but recomputation does. Upstream looks into the shard.
TEST(Recomputation, GathersWhatBackwardDoesNotNeed) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<EmbeddingNet>();
    net->to(torch::kDouble);
    reference->to(torch::kDouble);
    auto first = fully_shard(net->first, {.reshard_after_forward = true});
    fully_shard(net);
    first.set_unshard_in_backward(false);
    apply_activation_checkpointing(net->first);
    train_and_compare(net, reference, [](EmbeddingNet& each, int step) {
      return each(random_tokens(step, {2, 3}, 4)).pow(2).sum(); // rows that rank 0 has
    });
  });
}

} // namespace
} // namespace fsdp
