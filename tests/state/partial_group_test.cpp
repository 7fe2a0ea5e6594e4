// Groups of several modules of which one is called by itself: a loss head that
// runs over a sequence in chunks, each with its own backward.
#include <fsdp/activation_checkpointing.h>
#include <fsdp/debug.h>
#include <fsdp/tie_weights.h>

#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

struct ChunkedHeadImpl : torch::nn::Module {
  explicit ChunkedHeadImpl(bool tie = false)
      : embed(register_module("embed", Embedding(128, 32))),
        body(register_module("body", linear(32, 32, false))),
        norm(register_module("norm", layer_norm(32))),
        head(register_module("head", linear(32, 128, false))) {
    if (tie) {
      tie_weights(head, embed);
    }
  }
  torch::Tensor forward(const torch::Tensor& tokens, bool skip_head = false) {
    const auto x = torch::relu(body(embed(tokens)));
    TORCH_CHECK(!fail, "as asked");
    const auto h = norm(x);
    TORCH_CHECK(!fail_late, "as asked"); // one of the group has run
    return skip_head ? h : head(h);
  }
  Embedding embed;
  Linear body;
  LayerNorm norm;
  Linear head;
  bool fail = false;
  bool fail_late = false;
};
FSDP_MODULE(ChunkedHead);

ChunkedHead make(bool tie, bool grouped, const ReshardAfterForward& reshard) {
  auto net = seeded<ChunkedHead>(tie);
  const FullyShardOptions options{.reshard_after_forward = reshard};
  fully_shard(net->body, options);
  if (tie) {
    fully_shard({net->embed, net->norm, net->head}, options);
  } else {
    fully_shard(net->embed, options);
    if (grouped) {
      fully_shard({net->norm, net->head}, options);
    } else {
      fully_shard(net->norm, options);
      fully_shard(net->head, options);
    }
  }
  fully_shard(net, options);
  return net;
}

torch::Tensor tokens(int step) {
  return torch::randint(128, {2, 16}, generator(step), torch::kLong)
      .to(test_device()); // the same on all ranks
}

/// One iteration; returns the loss. `after_chunk` sees each chunk's backward.
template <class F>
double run_in_chunks(ChunkedHead& net, int step, F after_chunk) {
  auto h = net(tokens(step), /*skip_head=*/true);
  std::vector<torch::Tensor> grads;
  double loss = 0;
  for (const auto& part : h.detach().chunk(4, 1)) {
    auto chunk = part.clone().set_requires_grad(true);
    torch::Tensor chunk_loss = net->head(chunk).sum();
    loss += chunk_loss.item<double>();
    chunk_loss.backward();
    grads.push_back(chunk.grad());
    after_chunk();
  }
  h.backward(torch::cat(grads, 1));
  return loss;
}

TEST(PartialGroup, AHeadInChunksEqualsTheUnshardedModel) {
  run_ranks(2, [](int) {
    for (const ReshardAfterForward& reshard :
         {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(1)}) {
      for (const bool tie : {false, true}) {
        SCOPED_TRACE_OF(reshard, tie);
        auto net = make(tie, true, reshard);
        auto other = make(tie, false, reshard);
        auto reference = seeded<ChunkedHead>(tie);
        torch::optim::Adam a(unique_parameters(*net), 1e-2), b(unique_parameters(*reference), 1e-2),
            c(unique_parameters(*other), 1e-2);
        for (int step = 0; step < 4; ++step) {
          torch::Tensor before;
          const auto loss = run_in_chunks(net, step, [&] {
            const auto grad = net->head->weight.grad();
            EXPECT_TRUE(!before.defined() || !grad.equal(before)); // each is reduced at once
            before = grad.clone();
          });
          const auto expected = run_in_chunks(reference, step, [] {});
          EXPECT_NEAR(loss, expected, 1e-4 * std::abs(expected) + 1e-3);
          expect_parity(*net, *reference, 1e-4);
          if (!tie) {
            run_in_chunks(other, step, [] {});
            const auto separate = other->named_parameters();
            for (const auto& item : net->named_parameters()) {
              EXPECT_TRUE(near(item.value().grad(), separate[item.key()].grad(), 1e-4));
            }
          }
          for (auto* optimizer : {&a, &b, &c}) {
            optimizer->step();
            optimizer->zero_grad();
          }
        }
      }
    }
  });
}

TEST(PartialGroup, WithACheckpointedBodyAndHead) {
  run_ranks(2, [](int) {
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE_OF(reshard);
      auto net = make(/*tie=*/false, /*grouped=*/true, reshard);
      auto reference = seeded<ChunkedHead>(false);
      for (auto* part : {&net->body, &net->head}) {
        apply_activation_checkpointing(*part);
      }
      torch::optim::Adam a(unique_parameters(*net), 1e-2), b(unique_parameters(*reference), 1e-2);
      for (int step = 0; step < 4; ++step) {
        const auto loss = run_in_chunks(net, step, [] {});
        const auto expected = run_in_chunks(reference, step, [] {});
        EXPECT_NEAR(loss, expected, 1e-4 * std::abs(expected) + 1e-3);
        expect_parity(*net, *reference, 1e-4);
        for (auto* optimizer : {&a, &b}) {
          optimizer->step();
          optimizer->zero_grad();
        }
      }
    }
  });
}

TEST(PartialGroup, EachChunkCostsOneReductionAndAtMostOneGather) {
  run_ranks(2, [](int) {
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE_OF(reshard);
      auto net = make(false, true, reshard);
      CommDebugMode comm;
      std::vector<int> gathers, reductions;
      auto h = net(tokens(0), true);
      for (const auto& part : h.detach().chunk(4, 1)) {
        comm.clear();
        net->head(part.clone().set_requires_grad(true)).sum().backward();
        gathers.push_back(comm.count("all_gather"));
        reductions.push_back(comm.count("reduce_scatter"));
      }
      EXPECT_EQ(gathers, (std::vector<int>{reshard ? 1 : 0, 1, 1, 1}));
      EXPECT_EQ(reductions, (std::vector<int>{1, 1, 1, 1}));
    }
  });
}

TEST(PartialGroup, ChunksForwardAllAndThenBackwardAll) {
  run_ranks(2, [](int) {
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE_OF(reshard);
      auto net = make(false, true, reshard);
      auto reference = seeded<ChunkedHead>(false);
      const auto run = [](ChunkedHead& each) {
        auto h = each(tokens(0), true);
        std::vector<torch::Tensor> losses;
        for (const auto& part : h.detach().chunk(3, 1)) {
          losses.push_back(each->head(part.clone().set_requires_grad(true)).pow(2).sum());
        }
        for (auto& loss : losses) {
          loss.backward();
        }
        h.sum().backward();
      };
      run(net);
      run(reference);
      expect_parity(*net, *reference, 1e-4);
      torch::NoGradGuard no_grad;
      const auto ones = torch::ones({2, 32}, test_device());
      EXPECT_TRUE(near(net->head(ones), reference->head(ones), 1e-5));
      EXPECT_EQ(net->head->weight.size(0), 64); // nothing is left whole
    }
  });
}

TEST(PartialGroup, AccumulatesOverMicrobatchesAndChunks) {
  run_ranks(2, [](int) {
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE_OF(reshard);
      auto net = make(false, true, reshard);
      auto reference = seeded<ChunkedHead>(false);
      auto root = FSDPModule::of(net);
      for (int microbatch = 0; microbatch < 3; ++microbatch) {
        const bool last = microbatch == 2;
        root.set_requires_gradient_sync(last);
        root.set_is_last_backward(last);
        run_in_chunks(net, microbatch, [] {});
        run_in_chunks(reference, microbatch, [] {});
      }
      expect_parity(*net, *reference, 1e-4);
    }
  });
}

TEST(PartialGroup, ParametersCanBeKeptBetweenChunks) {
  run_ranks(2, [](int) {
    for (const bool tie : {false, true}) {
      for (const bool reshard : {false, true}) {
        SCOPED_TRACE_OF(tie, reshard);
        auto net = make(tie, true, reshard);
        auto reference = seeded<ChunkedHead>(tie);
        torch::optim::Adam a(unique_parameters(*net), 1e-2), b(unique_parameters(*reference), 1e-2);
        auto head = FSDPModule::of(net->head);
        for (int step = 0; step < 3; ++step) {
          auto h = net(tokens(step), true);
          head.set_reshard_after_forward(false);
          head.set_reshard_after_backward(false);
          std::vector<torch::Tensor> grads;
          for (const auto& part : h.detach().chunk(4, 1)) {
            auto chunk = part.clone().set_requires_grad(true);
            net->head(chunk).sum().backward();
            grads.push_back(chunk.grad());
            EXPECT_TRUE(head.is_unsharded());
          }
          head.set_reshard_after_forward(reshard);
          head.set_reshard_after_backward(true);
          head.reshard();
          EXPECT_FALSE(head.is_unsharded());
          h.backward(torch::cat(grads, 1));
          run_in_chunks(reference, step, [] {});
          expect_parity(*net, *reference, 1e-4);
          for (auto* optimizer : {&a, &b}) {
            optimizer->step();
            optimizer->zero_grad();
          }
        }
      }
    }
  });
}

TEST(PartialGroup, TwoForwardsThatSkipTheHead) {
  run_ranks(2, [](int) {
    auto net = make(false, true, true);
    auto reference = seeded<ChunkedHead>(false);
    (net(tokens(0), true).sum() + net(tokens(1), true).pow(2).sum()).backward();
    (reference(tokens(0), true).sum() + reference(tokens(1), true).pow(2).sum()).backward();
    expect_parity(*net, *reference, 1e-4);
    EXPECT_FALSE(net->head->weight.grad().defined());
  });
}

TEST(PartialGroup, AnExceptionBetween) {
  run_ranks(2, [](int) {
    for (const bool reset : {false, true}) {
      SCOPED_TRACE_OF(reset);
      auto net = make(false, true, true);
      auto reference = seeded<ChunkedHead>(false);
      net->fail = true;
      EXPECT_THROW(net(tokens(0), true), c10::Error);
      net->fail_late = true;
      net->fail = false;
      EXPECT_THROW(net(tokens(0), true), c10::Error);
      net->fail_late = false;
      if (reset) {
        FSDPModule::of(net).reset_iter_state();
      }
      train_and_compare(
          net, reference, [](ChunkedHead& each, int step) { return each(tokens(step)).sum(); }, 2);
    }
  });
}

} // namespace
} // namespace fsdp
