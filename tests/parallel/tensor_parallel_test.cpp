#include <fsdp/tensor_parallel.h>

#include <fsdp/clip_grad_norm.h>
#include <fsdp/nn.h>

#include "parallel/tp_models.h"

namespace fsdp {
namespace {

using namespace test;
using Placements = std::vector<Placement>;

class TensorParallel : public testing::TestWithParam<int> {
 protected:
  static void run(const std::function<void(const DeviceMesh& tp, int rank)>& body) {
    run_ranks(GetParam(), [&](int rank) {
      body(init_device_mesh(test_device(), {GetParam()}, {"tp"}), rank);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(
    Ranks, TensorParallel, testing::Values(2, 3, 4), testing::PrintToStringParamName());

// ------------------------------------------------------------ Training

TEST_P(TensorParallel, MLPByColumnsAndRows) {
  run([](const DeviceMesh& tp, int) {
    for (const int64_t dim : {16, 17, 3, 1}) { // even, uneven, with ranks that have nothing
      for (const bool bias : {true, false}) {
        SCOPED_TRACE(c10::str("dim ", dim, bias ? "" : ", no bias"));
        auto net = in_double<MLP>(dim, bias, false, dim == 1 ? 2 : 3);
        auto reference = in_double<MLP>(dim, bias, false, dim == 1 ? 2 : 3);
        parallelize_module(net, tp, mlp_plan());
        const auto x = tp_batch(99, {4, dim}).requires_grad_();
        const auto loss_of = [&](MLP& each, int step) {
          const auto input = step % 2 ? x : tp_batch(step, {4, dim});
          return each(input).pow(2).sum();
        };
        train_and_compare(net, reference, loss_of, 10);
        torch::Tensor grads[2];
        for (auto* each : {&net, &reference}) {
          x.mutable_grad().reset();
          loss_of(*each, 1).backward();
          grads[each == &net] = x.grad();
        }
        EXPECT_TRUE(near(grads[1], grads[0], 1e-5)); // whole on every rank
      }
    }
  });
}

TEST_P(TensorParallel, MLPStackWithAndWithoutSequenceParallel) {
  run([](const DeviceMesh& tp, int) {
    for (const int64_t dim : {16, 17, 3}) {
      for (const bool sequence : {false, true}) {
        SCOPED_TRACE(c10::str("dim ", dim, sequence ? ", sequence parallel" : ""));
        auto net = in_double<MLPStack>(dim, sequence);
        auto reference = in_double<MLPStack>(dim, sequence);
        parallelize(net, tp);
        const auto weight = tp_batch(77, {2, 5, dim});
        train_and_compare(
            net, reference,
            [&](MLPStack& each, int step) {
              auto y = each(tp_batch(step, {2, 5, dim}));
              if (sequence && &*each == &*net) {
                y = redistribute(y, tp, Shard{1}, Replicate{});
              }
              return (y * weight).sum();
            },
            10);
      }
    }
  });
}

ModelArgs args_for(int ranks, bool tied) {
  // The heads are divided, and have to be whole.
  return {
      .n_layers = 2,
      .vocab_size = 11,
      .dim = ranks == 3 ? 12 : 16,
      .n_heads = ranks == 3 ? 3 : 4,
      .dropout_p = 0,
      .weight_tying = tied};
}

TEST_P(TensorParallel, Transformer) {
  run([](const DeviceMesh& tp, int) {
    for (const bool sequence : {false, true}) {
      for (const bool tied : {false, true}) {
        SCOPED_TRACE(c10::str("sequence parallel ", sequence, ", tied ", tied));
        const auto args = args_for(GetParam(), tied);
        auto net = in_double<Transformer>(args);
        auto reference = in_double<Transformer>(args);
        parallelize(net, tp, sequence);
        EXPECT_EQ(net->output->weight.is_same(net->tok_embeddings->weight), tied);
        train_and_compare(
            net, reference,
            [](Transformer& each, int step) {
              const auto tokens = tp_tokens(step, {2, 14 + step % 3}, 11); // other lengths, too
              return torch::nn::functional::cross_entropy(
                  each(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten());
            },
            10);
      }
    }
  });
}

TEST_P(TensorParallel, TransformerWithDividedLogits) {
  run([](const DeviceMesh& tp, int) {
    const auto args = args_for(GetParam(), true);
    auto net = in_double<Transformer>(args);
    auto reference = in_double<Transformer>(args);
    parallelize(net, tp, /*sequence=*/true, /*local_logits=*/true);
    train_and_compare(
        net, reference,
        [&](Transformer& each, int step) {
          const auto tokens = tp_tokens(step, {2, 16}, 11);
          const auto targets = tokens.roll(-1, 1).flatten();
          const auto logits = each(tokens).flatten(0, 1);
          if (!is_parallel(*each->output)) {
            return torch::nn::functional::cross_entropy(logits, targets);
          }
          EXPECT_EQ(logits.size(1), each->output->weight.size(0));
          return parallel_cross_entropy(logits, targets, tp);
        },
        10);
  });
}

TEST_P(TensorParallel, EmbeddingsByColumnsAndRows) {
  run([](const DeviceMesh& tp, int) {
    for (const int64_t rows : {10, 3}) {
      for (const bool by_rows : {true, false}) {
        SCOPED_TRACE(c10::str(rows, by_rows ? " by rows" : " by columns"));
        const auto options = torch::nn::EmbeddingOptions(rows, 5).padding_idx(2);
        auto [net, reference] = twins<Embedding>(options);
        const ParallelPlan plan =
            by_rows ? ParallelPlan(RowwiseParallel{.input_layouts = Replicate{}})
                    : ParallelPlan(ColwiseParallel{.output_layouts = Replicate{}});
        parallelize_module(net, tp, plan);
        train_and_compare(
            net, reference,
            [&](Embedding& each, int step) {
              return each(tp_tokens(step, {3, 4}, rows)).pow(3).sum();
            },
            10);
        EXPECT_EQ(*net->options.padding_idx(), 2);
        EXPECT_EQ(as_dtensor(net->weight).placements(), (Placements{Shard{by_rows ? 0 : 1}}));
      }
    }
  });
}

// Layouts on both sides of a Linear, in all combinations.
TEST_P(TensorParallel, EveryLayoutOfALinear) {
  run([](const DeviceMesh& tp, int) {
    const Placements layouts{Replicate{}, Shard{0}, Shard{1}, Shard{-1}, Partial{}};
    const std::vector<int64_t> in_sizes{4, 5, 6};
    const std::vector<int64_t> out_sizes{4, 5, 7};
    const auto weight = tp_batch(3, out_sizes);
    for (const auto& input : layouts) {
      for (const auto& output : layouts) {
        for (const bool by_rows : {true, false}) {
          SCOPED_TRACE(c10::str(
              to_string(input), " to ", to_string(output), by_rows ? " by rows" : " by columns"));
          auto net = in_double<Linear>(6, 7);
          auto reference = in_double<Linear>(6, 7);
          by_rows ? parallelize_module(
                        net, tp, RowwiseParallel{.input_layouts = input, .output_layouts = output})
                  : parallelize_module(
                        net, tp, ColwiseParallel{.input_layouts = input, .output_layouts = output});
          torch::Tensor grads[2];
          train_and_compare(
              net, reference,
              [&](Linear& each, int step) {
                const auto x = tp_batch(step, in_sizes).requires_grad_();
                x.register_hook([&grads, parallel = is_parallel(*each)](const torch::Tensor& grad) {
                  grads[parallel] = grad;
                });
                if (!is_parallel(*each)) {
                  return (each(x) * weight).sum();
                }
                const auto y = each(redistribute(x, tp, Replicate{}, input));
                return (redistribute(y, tp, output, Replicate{}, {.sizes = out_sizes}) * weight)
                    .sum();
              },
              2);
          EXPECT_TRUE(near(grads[1], grads[0], 1e-5));
        }
      }
    }
  });
}

// ------------------------------------------------------------ Parameters

TEST(TensorParallelParams, ArePiecesOfWhatTheFirstRankHas) {
  run_ranks(3, [](int rank) {
    const auto tp = init_device_mesh(test_device(), {3}, {"tp"});
    auto net = in_double<MLP>(5);
    auto reference = in_double<MLP>(5);
    torch::optim::SGD optimizer(net->parameters(), 0.1); // made before
    {
      at::NoGradGuard no_grad;
      for (const auto& param : net->parameters()) {
        param.add_(rank);
      }
    }
    const auto* weight = net->in_proj->weight.unsafeGetTensorImpl();
    parallelize_module(net, tp, mlp_plan());
    EXPECT_EQ(net->in_proj->weight.unsafeGetTensorImpl(), weight);
    EXPECT_EQ(net->in_proj->weight.size(0), rank < 2 ? 7 : 6);
    const auto expect = [&](const torch::Tensor& param, const Placement& placement,
                            const torch::Tensor& whole) {
      const auto spread = as_dtensor(param);
      EXPECT_EQ(spread.placements(), Placements{placement});
      EXPECT_EQ(spread.device_mesh(), tp);
      EXPECT_EQ(spread.sizes(), whole.sizes());
      EXPECT_SAME(spread.full_tensor(), whole.detach());
      EXPECT_TRUE(param.is_leaf() && param.requires_grad());
    };
    expect(net->in_proj->weight, Shard{0}, reference->in_proj->weight);
    expect(net->in_proj->bias, Shard{0}, reference->in_proj->bias);
    expect(net->out_proj->weight, Shard{1}, reference->out_proj->weight);
    expect(net->out_proj->bias, Replicate{}, reference->out_proj->bias);
    EXPECT_EQ(named_dtensors(net).keys(), net->named_parameters().keys());

    net(tp_batch(0, {2, 5})).sum().backward();
    reference(tp_batch(0, {2, 5})).sum().backward();
    EXPECT_TRUE(near(
        as_dtensor_grad(net->in_proj->weight).full_tensor(), reference->in_proj->weight.grad(),
        1e-5));
    optimizer.step();
    torch::optim::SGD(reference->parameters(), 0.1).step();
    expect_parity(*net, *reference);
  });
}

TEST(TensorParallelParams, FrozenAndUnfrozen) {
  run_ranks(2, [](int) {
    const auto tp = init_device_mesh(test_device(), {2}, {"tp"});
    auto net = in_double<MLPStack>(4, true);
    auto reference = in_double<MLPStack>(4, true);
    for (auto* each : {&net, &reference}) {
      (*each)->norm->weight.set_requires_grad(false);
      (*each)->mlps[1]->in_proj->weight.set_requires_grad(false);
      (*each)->mlps[1]->out_proj->bias.set_requires_grad(false);
    }
    parallelize(net, tp);
    EXPECT_FALSE(net->norm->weight.requires_grad());
    const auto weight = tp_batch(77, {2, 6, 4});
    const auto loss_of = [&](MLPStack& each, int step) {
      auto y = each(tp_batch(step, {2, 6, 4}));
      y = &*each == &*net ? redistribute(y, tp, Shard{1}, Replicate{}) : y;
      return (y * weight).sum();
    };
    train_and_compare(net, reference, loss_of, 2);
    for (auto* each : {&net, &reference}) {
      (*each)->norm->weight.set_requires_grad(true);
    }
    train_and_compare(net, reference, loss_of, 2);
  });
}

TEST(TensorParallelParams, NormsOfGradientsAreThoseOfTheWhole) {
  run_ranks(4, [](int) {
    const auto tp = init_device_mesh(test_device(), {4}, {"tp"});
    for (const double order : {2.0, 1.0, static_cast<double>(INFINITY)}) {
      SCOPED_TRACE_OF(order);
      auto net = in_double<MLPStack>(17);
      auto reference = in_double<MLPStack>(17);
      parallelize(net, tp);
      net(tp_batch(0, {8, 17})).pow(2).sum().backward();
      reference(tp_batch(0, {8, 17})).pow(2).sum().backward();
      const auto norm = clip_grad_norm_(net->parameters(), 0.5, order);
      const auto expected = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.5, order);
      EXPECT_NEAR(norm.item<double>(), expected, 1e-4 * expected);
      expect_parity(*net, *reference);
    }
  });
}

// ------------------------------------------------------------ Calls

/// Takes and gives several tensors.
struct PairImpl : torch::nn::Module {
  std::tuple<torch::Tensor, torch::Tensor> forward(
      const torch::Tensor& x, const std::optional<torch::Tensor>& y, int64_t factor) {
    seen = {x.sizes().vec(), y ? y->sizes().vec() : std::vector<int64_t>()};
    return {x * factor, y ? *y * factor : x};
  }
  std::vector<std::vector<int64_t>> seen;
};
FSDP_MODULE(Pair);

TEST(TensorParallelCalls, SeveralTensorsArePreparedOneByOne) {
  run_ranks(2, [](int rank) {
    const auto tp = init_device_mesh(test_device(), {2}, {"tp"});
    Pair net;
    parallelize_module(
        net, tp,
        PrepareModuleInputOutput{
            .input_layouts = {Shard{0}, std::nullopt},
            .desired_input_layouts = {Replicate{}, std::nullopt},
            .output_layouts = {Replicate{}, Replicate{}},
            .desired_output_layouts = {Shard{1}, Replicate{}}});
    const auto x = torch::arange(8.0).view({2, 4}).requires_grad_(); // rank's two rows
    const auto y = torch::ones({3}).requires_grad_();
    const auto [a, b] = net(x + 8 * rank, y, 2);
    EXPECT_EQ(net->seen, (std::vector<std::vector<int64_t>>{{4, 4}, {3}}));
    EXPECT_SAME(
        a.detach(), (2 * torch::arange(16.0).view({4, 4})).narrow(1, 2 * rank, 2).contiguous());
    EXPECT_SAME(b.detach(), torch::full({3}, 2.0));
    (a.sum() + b.sum()).backward();
    EXPECT_SAME(x.grad(), torch::full({2, 4}, 2.0));
    const auto message = message_of<c10::ValueError>([&] { net(x, std::nullopt, 1); });
    EXPECT_TRUE(contains(message, "1 tensors as input, but the plan gives 2"));

    Pair split; // by two calls
    parallelize_module(
        split, tp,
        PrepareModuleInput{
            .input_layouts = {Replicate{}, Replicate{}},
            .desired_input_layouts = {Shard{0}, std::nullopt}});
    parallelize_module(
        split, tp,
        PrepareModuleOutput{
            .output_layouts = {Shard{0}, std::nullopt},
            .desired_output_layouts = {Replicate{}, Replicate{}}});
    const auto [c, d] = split(x.detach(), y, 3);
    EXPECT_EQ(split->seen.front(), (std::vector<int64_t>{1, 4}));
    EXPECT_SAME(c, 3 * x.detach());
  });
}

struct ThrowingImpl : torch::nn::LinearImpl {
  using LinearImpl::LinearImpl;
  torch::Tensor forward(const torch::Tensor& x) {
    TORCH_CHECK(!fail, "as asked");
    return LinearImpl::forward(x);
  }
  bool fail = false;
};
FSDP_MODULE(Throwing);

TEST(TensorParallelCalls, AnExceptionLeavesTheModuleAsItWas) {
  run_ranks(2, [](int) {
    const auto tp = init_device_mesh(test_device(), {2}, {"tp"});
    auto net = in_double<Throwing>(4, 6);
    auto reference = in_double<Throwing>(4, 6);
    parallelize_module(net, tp, RowwiseParallel{.input_layouts = Replicate{}});
    const auto* bias = net->bias.unsafeGetTensorImpl();
    net->fail = true;
    EXPECT_THROW(net(tp_batch(0, {2, 4})), c10::Error);
    net->fail = false;
    EXPECT_EQ(net->bias.unsafeGetTensorImpl(), bias);
    EXPECT_TRUE(
        near(net(tp_batch(0, {2, 4})).detach(), reference(tp_batch(0, {2, 4})).detach(), 1e-6));
    EXPECT_THROW(net(tp_batch(0, {2, 3})), c10::Error); // by a hook
    EXPECT_EQ(net->bias.unsafeGetTensorImpl(), bias);
  });
}

TEST(TensorParallelCalls, CopiesAndArchivesAreRefused) {
  run_ranks(2, [](int) {
    auto net = in_double<MLP>(4);
    parallelize_module(net, init_device_mesh(test_device(), {2}, {"tp"}), mlp_plan());
    const auto message = message_of<c10::Error>([&] { (void)net->in_proj->clone(); });
    EXPECT_TRUE(contains(message, "parallelize_module does not support deepcopy"));
    torch::serialize::OutputArchive archive;
    EXPECT_THROW(net->save(archive), c10::Error);
  });
}

} // namespace
} // namespace fsdp
