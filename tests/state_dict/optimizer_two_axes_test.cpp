// State dicts of optimizers on meshes of two axes.
#include <fsdp/optim.h>

#include "checkpoint/state_dicts.h"

namespace fsdp {
namespace {

using namespace test;

struct SimpleModelImpl : torch::nn::Module {
  SimpleModelImpl()
      : net1(register_module("net1", linear(5, 8))),
        net2(register_module("net2", linear(8, 4))),
        net3(register_module("net3", linear(4, 12))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return net3(torch::relu(net2(torch::relu(net1(x)))));
  }
  Linear net1, net2, net3;
};
FSDP_MODULE(SimpleModel);

TEST(OptimizerStateDict, FullOnesOfTwoAxesAreSetBack) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    auto net = seeded<SimpleModel>();
    parallelize_module(
        net, mesh["tp"],
        ParallelPlan{
            {"net1", ColwiseParallel{}},
            {"net2", RowwiseParallel{}},
            {"net3", ColwiseParallel{.output_layouts = Replicate{}}}});
    fully_shard(net, {.mesh = mesh["dp"]});
    torch::optim::Adam optimizer(net->parameters(), 0.1);
    net(torch::randn({3, 5}, generator(mesh.get_local_rank("dp"))).to(test_device()))
        .sum()
        .backward();
    optimizer.step();
    optimizer.zero_grad();
    const auto model = copy_of(get_model_state_dict(net));
    const auto state = copy_of(get_optimizer_state_dict(net, optimizer));
    const auto full_model = get_model_state_dict(net, kFull);
    const auto full_state = get_optimizer_state_dict(net, optimizer, kFull);
    EXPECT_EQ(full_state.empty(), get_rank() != 0);
    for (const auto* dict : {&model, &state}) {
      const auto live =
          dict == &model ? get_model_state_dict(net) : get_optimizer_state_dict(net, optimizer);
      for (const auto& [key, value] : live) {
        if (value.index() < 2) {
          local_of(value).zero_();
        }
      }
    }
    set_model_state_dict(net, full_model, kFromRank0);
    set_optimizer_state_dict(net, optimizer, full_state, kFromRank0);
    expect_same_state(get_model_state_dict(net), model);
    expect_same_state(get_optimizer_state_dict(net, optimizer), state);
  });
}

TEST(OptimizerStateDict, ATransformerOfTwoAxesIsResumed) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    const ModelArgs args{.dropout_p = 0};
    const auto make = [&](bool sequence, bool other_values) {
      auto net = in_double<Transformer>(args);
      if (other_values) {
        torch::NoGradGuard no_grad;
        for (auto& param : unique_parameters(*net)) {
          param.mul_(-0.5);
        }
      }
      parallelize(net, mesh["tp"], sequence);
      shard_transformer(net, {.mesh = mesh["dp"]});
      return net;
    };
    const auto train_once = [&](Transformer& net, torch::optim::Optimizer& optimizer, int step) {
      auto loss = net(tp_tokens(step, {2, 16}, 8, mesh.get_local_rank("dp"))).pow(2).sum();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      return loss.item<double>();
    };
    for (const bool sequence : {true, false}) {
      for (const bool reuse : {true, false}) {
        SCOPED_TRACE_OF(sequence, reuse);
        auto net = make(sequence, false);
        torch::optim::AdamW optimizer(unique_parameters(*net), 1e-2);
        train_once(net, optimizer, 0);
        const auto model = copy_of(get_model_state_dict(net));
        const auto state = copy_of(get_optimizer_state_dict(net, optimizer));
        const auto expected = train_once(net, optimizer, 1);

        auto resumed = reuse ? net : make(sequence, true);
        torch::optim::AdamW other(unique_parameters(*resumed), 1e-2);
        auto& used = reuse ? optimizer : other;
        EXPECT_NE(train_once(resumed, used, 1), expected);
        set_model_state_dict(resumed, model);
        set_optimizer_state_dict(resumed, used, state);
        EXPECT_FALSE(used.state().empty());
        EXPECT_EQ(train_once(resumed, used, 1), expected);
      }
    }
  });
}

} // namespace
} // namespace fsdp
