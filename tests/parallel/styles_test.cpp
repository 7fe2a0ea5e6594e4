// Styles of parallelize_module: inputs that several modules share, plans in every order, and
// parameters that fully_shard divides once more.
#include <fsdp/activation_checkpointing.h>
#include <fsdp/nn.h>

#include "parallel/tp_models.h"

namespace fsdp {
namespace {

using namespace test;

// ------------------------------------------------------------ Shared inputs

/// A Linear that keeps its last input, to log it.
struct TapImpl : torch::nn::LinearImpl {
  using LinearImpl::LinearImpl;
  torch::Tensor forward(const torch::Tensor& x) {
    if (keep) {
      kept = x;
    }
    return LinearImpl::forward(x);
  }
  bool keep = false;
  torch::Tensor kept;
};
FSDP_MODULE(Tap);

struct TwoTapsImpl : torch::nn::Module {
  TwoTapsImpl() : a(register_module("a", Tap(6, 6))), b(register_module("b", Tap(6, 6))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const auto first = a(x);
    return first + b(x);
  }
  Tap a, b;
};
FSDP_MODULE(TwoTaps);

// Rank 0 keeps an activation alive, the others do not.
TEST(SharedInputs, WhoeverKeepsAnInputAliveMakesTheSameCollectives) {
  for (const bool checkpointed : {false, true}) {
    run_ranks(2, [&](int rank) {
      SCOPED_TRACE_OF(checkpointed);
      const auto tp = init_device_mesh(test_device(), {2}, {"tp"});
      auto net = in_double<TwoTaps>();
      auto reference = in_double<TwoTaps>();
      parallelize_module(
          net, tp,
          {{"*", ColwiseParallel{.input_layouts = Shard{0}, .output_layouts = Replicate{}}}});
      net->a->keep = rank == 0;
      if (checkpointed) {
        apply_activation_checkpointing(net->a);
        apply_activation_checkpointing(net->b);
      }
      const at::AutoGradMode grad_mode(checkpointed);
      const auto whole = tp_batch(0, {4, 6});
      CommDebugMode comm;
      const auto y = net(whole.chunk(2, 0)[rank]);
      EXPECT_TRUE(near(y.detach(), reference(whole).detach(), 1e-6));
      net->a->kept.reset();
    });
  }
}

/// Halves the gradient of its input, as a reversal layer would negate it.
struct HalvesImpl : torch::nn::Module {
  HalvesImpl() : a(register_module("a", linear(6, 6))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    x.register_hook([](const torch::Tensor& grad) { return grad * 0.5; });
    return a(x);
  }
  Linear a;
};
FSDP_MODULE(Halves);

TEST(SharedInputs, HooksOnAGatheredInputSeeItsGradient) {
  run_ranks(2, [](int rank) {
    const auto tp = init_device_mesh(test_device(), {2}, {"tp"});
    auto net = in_double<Halves>();
    auto reference = in_double<Halves>();
    parallelize_module(
        net, tp,
        {{"", PrepareModuleInput{.input_layouts = Shard{0}, .desired_input_layouts = Replicate{}}},
         {"a", ColwiseParallel{.output_layouts = Replicate{}}}});
    const auto whole = tp_batch(0, {4, 6}).requires_grad_();
    reference(whole).pow(2).sum().backward();
    const auto x = whole.detach().chunk(2, 0)[rank].clone().requires_grad_();
    net(x).pow(2).sum().backward();
    EXPECT_TRUE(near(x.grad(), whole.grad().chunk(2, 0)[rank], 1e-6));
  });
}

// ------------------------------------------------------------ Plans

struct NormNetImpl : torch::nn::Module {
  NormNetImpl()
      : lin(register_module("lin", linear(4, 4))), norm(register_module("norm", layer_norm(4))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return norm(lin(x));
  }
  Linear lin;
  LayerNorm norm;
};
FSDP_MODULE(NormNet);

TEST(Styles, SequenceParallelOfWhatDistributeModulePlaced) {
  run_ranks(2, [](int) {
    const auto tp = init_device_mesh(test_device(), {2}, {"tp"});
    auto net = in_double<NormNet>();
    auto reference = in_double<NormNet>();
    distribute_module(net, tp);
    parallelize_module(
        net, tp,
        {{"norm",
          PrepareModuleInput{.input_layouts = Replicate{}, .desired_input_layouts = Shard{1}}},
         {"norm", SequenceParallel{}},
         {"norm",
          PrepareModuleOutput{.output_layouts = Shard{1}, .desired_output_layouts = Replicate{}}}});
    const auto weight = tp_batch(7, {2, 4, 4});
    for (auto* each : {&net, &reference}) {
      ((*each)(tp_batch(0, {2, 4, 4}))*weight).sum().backward();
    }
    expect_parity(*net, *reference);
  });
}

TEST(Styles, LayoutsOfAModuleAreGivenOnce) {
  run_ranks(2, [](int) {
    const auto tp = init_device_mesh(test_device(), {2}, {"tp"});
    auto net = in_double<MLP>(4);
    const PrepareModuleInput gather{
        .input_layouts = Shard{0}, .desired_input_layouts = Replicate{}};
    EXPECT_THROW(
        parallelize_module(net, tp, {{"*", gather}, {"in_proj", gather}}), c10::ValueError);
  });
}

TEST(Styles, StylesThatPrepareNothing) {
  run_ranks(2, [](int) {
    const auto tp = init_device_mesh(test_device(), {2}, {"tp"});
    const auto x = tp_batch(0, {2, 4});
    auto input = in_double<Linear>(4, 4);
    parallelize_module(input, tp, PrepareModuleInput{});
    EXPECT_NO_THROW(input(x));
    auto both = in_double<Linear>(4, 4);
    parallelize_module(
        both, tp,
        PrepareModuleInputOutput{
            .input_layouts = Replicate{}, .desired_input_layouts = Replicate{}});
    EXPECT_NO_THROW(both(x));
  });
}

/// A Linear with a Linear of its own beside it, as LoRA has it.
struct BesideImpl : torch::nn::LinearImpl {
  BesideImpl() : LinearImpl(6, 6), small(register_module("small", nn::Linear(6, 6))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return LinearImpl::forward(x);
  }
  nn::Linear small;
};
FSDP_MODULE(Beside);

TEST(Styles, AStyleDividesTheParametersOfItsModuleOnly) {
  run_ranks(2, [&](int) {
    const auto tp = init_device_mesh(test_device(), {2}, {"tp"});
    Beside colwise;
    Beside rowwise;
    parallelize_module(colwise, tp, ColwiseParallel{});
    parallelize_module(rowwise, tp, RowwiseParallel{});
    EXPECT_EQ(colwise->weight.sizes(), (at::IntArrayRef{3, 6}));
    EXPECT_EQ(rowwise->weight.sizes(), (at::IntArrayRef{6, 3}));
    for (const auto& each : {colwise, rowwise}) {
      EXPECT_EQ(each->small->weight.sizes(), (at::IntArrayRef{6, 6}));
    }
    distribute_parameter(colwise->small, "weight", tp, {Shard{0}});
    EXPECT_EQ(colwise->small->weight.sizes(), (at::IntArrayRef{3, 6}));
  });
}

// ------------------------------------------------------------ Divided by fully_shard as well

// 256 + 1 is 256 in bf16.
TEST(DividedTwice, GradientsOfTpRanksAreSummedInTheReduceDtype) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    auto net = seeded<LayerNorm>(torch::nn::LayerNormOptions({4}));
    parallelize_module(net, mesh["tp"], SequenceParallel{});
    fully_shard(
        net, {.mesh = mesh["dp"],
              .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
    const auto out = net(random_batch(0, {1, 1, 4}));
    (out * (mesh["tp"].get_local_rank() == 0 ? 256 : 1)).sum().backward();
    EXPECT_SAME(net->bias.grad(), torch::full_like(net->bias.grad(), 257));
  });
}

// tp divides 5 columns into 3 and 2; dp divides 3 into 2 and 1.
TEST(DividedTwice, ColumnsThatAreDividedTwiceUnevenly) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    auto net = in_double<Linear>(5, 4);
    auto reference = in_double<Linear>(5, 4);
    parallelize_module(net, mesh["tp"], RowwiseParallel{.input_layouts = Replicate{}});
    const auto by_columns = [](const std::string& name,
                               const at::Tensor&) -> std::optional<ShardPlacement> {
      return ShardPlacement{.dim = name == "weight" ? 1 : 0};
    };
    fully_shard(net, {.mesh = mesh["dp"], .shard_placement_fn = by_columns});
    for (auto* each : {&net, &reference}) {
      (*each)(tp_batch(0, {2, 5})).pow(2).sum().backward();
    }
    average_gradients(*reference);
    expect_parity(*net, *reference);
  });
}

// Ranks of tp that have nothing of a group, which dp then shards.
TEST(DividedTwice, EmptyPiecesAreSharded) {
  run_ranks(8, [](int rank) {
    const auto mesh = init_device_mesh(test_device(), {2, 4}, {"dp", "tp"});
    auto net = in_double<MLP>(1, true, false, 2);
    auto reference = in_double<MLP>(1, true, false, 2);
    parallelize_module(net, mesh["tp"], mlp_plan());
    fully_shard(net->in_proj, {.mesh = mesh["dp"]});
    fully_shard(net, {.mesh = mesh["dp"]});
    train_and_compare(net, reference, [&](MLP& each, int step) {
      return each(tp_batch(step, {4, 1}, rank / 4)).pow(2).sum();
    });
  });
}

} // namespace
} // namespace fsdp
