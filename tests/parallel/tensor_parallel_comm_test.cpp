// What ranks send with tensor parallelism.
#include <fsdp/tensor_parallel.h>

#include "parallel/tp_models.h"

namespace fsdp {
namespace {

using namespace test;
using Placements = std::vector<Placement>;

TEST(TensorParallelComm, OneReductionPerMLPAndDirection) {
  run_ranks(4, [](int) {
    auto net = in_double<MLPStack>(16);
    parallelize(net, init_device_mesh(test_device(), {4}, {"tp"}));
    CommDebugMode comm;
    auto loss = net(tp_batch(0, {8, 16})).sum();
    EXPECT_EQ(comm.count("all_reduce"), 3);
    EXPECT_EQ(comm.total(), 3);
    std::vector<std::string> modules;
    for (const auto& call : comm.calls()) {
      modules.push_back(call.module);
    }
    EXPECT_EQ(modules, (std::vector<std::string>{"0.out_proj", "1.out_proj", "2.out_proj"}));
    comm.clear();
    loss.backward();
    EXPECT_EQ(comm.count("all_reduce"), 2); // the first MLP's input needs no gradient
    EXPECT_EQ(comm.total(), 2);
    comm.clear();
    at::NoGradGuard no_grad;
    EXPECT_FALSE(net(tp_batch(0, {8, 16})).requires_grad());
    EXPECT_EQ(comm.count("all_reduce"), 3);
  });
}

TEST(TensorParallelComm, TransformerBySequence) {
  run_ranks(2, [](int) {
    const auto tp = init_device_mesh(test_device(), {2}, {"tp"});
    auto net =
        in_double<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0, .weight_tying = false});
    parallelize(net, tp, /*sequence=*/true);
    CommDebugMode comm;
    auto loss = net(tp_tokens(0, {2, 16}, 8)).sum();
    EXPECT_EQ(comm.count("all_gather"), 2 * 3 + 2);     // for attention, w1, output; its logits
    EXPECT_EQ(comm.count("reduce_scatter"), 2 + 2 * 3); // by the embeddings, wo, w2
    EXPECT_EQ(comm.total(), 8 + 8);
    comm.clear();
    loss.backward();
    // wq, wk, wv add up before the one that ends attention's gather
    EXPECT_EQ(comm.count("reduce_scatter"), 2 * 3 + 1);
    EXPECT_EQ(comm.count("all_gather"), 2 + 2 * 3);
    EXPECT_EQ(comm.count("all_reduce"), (2 * 3 + 1) * 2); // weight and bias of each norm
    EXPECT_EQ(comm.total(), 7 + 8 + 14);
  });
}

TEST(TensorParallelComm, TransformerWithReplicatedActivations) {
  run_ranks(2, [](int) {
    const auto tp = init_device_mesh(test_device(), {2}, {"tp"});
    auto net =
        in_double<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0, .weight_tying = false});
    parallelize(net, tp, /*sequence=*/false);
    CommDebugMode comm;
    auto loss = net(tp_tokens(0, {2, 16}, 8)).sum();
    EXPECT_EQ(comm.count("all_reduce"), 2 + 2 * 3);
    EXPECT_EQ(comm.count("all_gather"), 1); // the logits
    EXPECT_EQ(comm.total(), 9);
    comm.clear();
    loss.backward();
    EXPECT_EQ(comm.count("all_reduce"), 2 * 3 + 1); // upstream 13: wq, wk and wv have one each
    EXPECT_EQ(comm.total(), 7);
  });
}

/// Three Linears on one input.
struct FanOutImpl : torch::nn::Module {
  FanOutImpl() {
    for (const char* name : {"a", "b", "c"}) {
      linears.push_back(register_module(name, linear(6, 6)));
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return linears[0](x) + linears[1](x) * linears[2](x);
  }
  std::vector<Linear> linears;
};
FSDP_MODULE(FanOut);

TEST(TensorParallelComm, ModulesThatShareAnInputShareItsMoves) {
  run_ranks(2, [](int rank) {
    const auto tp = init_device_mesh(test_device(), {2}, {"tp"});
    for (const Placement& layout : Placements{Replicate{}, Shard{1}}) {
      SCOPED_TRACE(to_string(layout));
      auto net = in_double<FanOut>();
      auto reference = in_double<FanOut>();
      parallelize_module(net, tp, {{"*", ColwiseParallel{.input_layouts = layout}}});
      const bool gathers = layout != Placement(Replicate{});
      CommDebugMode comm;
      for (int step = 0; step < 3; ++step) {
        const auto whole = tp_batch(step, {3, 4, 6}).requires_grad_();
        reference(whole).pow(2).sum().backward();
        const auto x =
            (gathers ? whole.detach().chunk(2, 1)[rank] : whole.detach()).requires_grad_();
        comm.clear();
        net(x).pow(2).sum().backward();
        EXPECT_EQ(comm.count("all_gather"), gathers ? 3 : 0);
        EXPECT_EQ(comm.count("reduce_scatter"), gathers ? 3 : 0);
        EXPECT_EQ(comm.total(), gathers ? 6 : 1);
        EXPECT_TRUE(near(x.grad(), gathers ? whole.grad().chunk(2, 1)[rank] : whole.grad(), 1e-5));
      }
      expect_parity(*net, *reference);
      // What has been edited since is another input.
      at::NoGradGuard no_grad;
      auto x = torch::ones({3, 4, 6}, torch::device(test_device()).dtype(torch::kDouble));
      const auto first = net(x);
      x.mul_(2);
      EXPECT_FALSE(torch::allclose(net(x), first));
    }
  });
}

TEST(TensorParallelComm, OneRankIsSilent) {
  run_ranks(1, [](int) {
    const auto tp = init_device_mesh(test_device(), {1}, {"tp"});
    auto net = in_double<Transformer>(ModelArgs{.dropout_p = 0});
    parallelize(net, tp, /*sequence=*/true);
    CommDebugMode comm;
    net(tp_tokens(0, {2, 16}, 8)).sum().backward();
    EXPECT_EQ(comm.total(), 0);
  });
}

} // namespace
} // namespace fsdp
