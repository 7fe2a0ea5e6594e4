// State dicts of optimizers: by name, on any number of ranks, for every kind.
#include <fsdp/optim.h>
#include <torch/optim/schedulers/step_lr.h>

#include "checkpoint/state_dicts.h"

namespace fsdp {
namespace {

using namespace test;
using Keys = std::vector<std::string>;
using Params = std::vector<torch::Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(Params)>;

template <class Optimizer, class Options>
MakeOptimizer maker(const Options& options) {
  return
      [options](Params params) { return std::make_unique<Optimizer>(std::move(params), options); };
}

std::vector<std::pair<std::string, MakeOptimizer>> all_optimizers() {
  namespace torch_optim = torch::optim;
  const auto adamw = torch_optim::AdamWOptions(1e-2).amsgrad(true);
  const auto sgd = torch_optim::SGDOptions(1e-2).momentum(0.9).nesterov(true);
  return {
      {"Adam", maker<torch_optim::Adam>(torch_optim::AdamOptions(1e-2).betas({0.8, 0.9}))},
      {"AdamW", maker<torch_optim::AdamW>(adamw)},
      {"fsdp AdamW", maker<optim::AdamW>(adamw)},
      {"SGD", maker<torch_optim::SGD>(sgd)},
      {"fsdp SGD", maker<optim::SGD>(sgd)},
      {"SGD without momentum", maker<torch_optim::SGD>(torch_optim::SGDOptions(1e-2))},
      {"RMSprop",
       maker<torch_optim::RMSprop>(torch_optim::RMSpropOptions(1e-3).momentum(0.5).centered(true))},
      {"Adagrad", maker<torch_optim::Adagrad>(
                      torch_optim::AdagradOptions(1e-2).initial_accumulator_value(0.1))},
      {"Muon", maker<optim::Muon>(optim::MuonOptions(1e-2).ns_dtype(torch::kDouble))}};
}

/// Each MLP, and the rest.
void shard_stack(Stack& net, const FullyShardOptions& options = {}) {
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, options);
  }
  fully_shard(net, options);
}

double train(Stack& net, torch::optim::Optimizer& optimizer, int step) {
  auto loss = net(same_batch(step, {4, 5})).pow(2).sum();
  loss.backward();
  optimizer.step();
  optimizer.zero_grad();
  return loss.item<double>();
}

// ------------------------------------------------------------ Get

TEST(OptimizerStateDict, HasPythonsNamesAndTheParametersPlacements) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(4);
    fully_shard(net);
    optim::AdamW optimizer(
        net->parameters(), torch::optim::AdamWOptions(0.1).betas({0.5, 0.75}).weight_decay(0.2));
    net(random_batch(0, {2, 4})).sum().backward();
    optimizer.step();
    const auto state = get_optimizer_state_dict(net, optimizer);
    const auto keys = state.keys();
    EXPECT_EQ(
        Keys(keys.begin(), keys.begin() + 4),
        (Keys{
            "state.in_proj.weight.step", "state.in_proj.weight.exp_avg",
            "state.in_proj.weight.exp_avg_sq", "state.in_proj.bias.step"}));
    EXPECT_EQ(
        Keys(keys.end() - 6, keys.end()),
        (Keys{
            "param_groups.out_proj.bias.lr", "param_groups.out_proj.bias.betas.0",
            "param_groups.out_proj.bias.betas.1", "param_groups.out_proj.bias.eps",
            "param_groups.out_proj.bias.weight_decay", "param_groups.out_proj.bias.amsgrad"}));
    EXPECT_EQ(state.size(), 4 * (3 + 6));
    EXPECT_EQ(std::get<int64_t>(state.at("state.in_proj.weight.step")), 1);
    EXPECT_EQ(std::get<double>(state.at("param_groups.in_proj.weight.lr")), 0.1);
    EXPECT_EQ(std::get<double>(state.at("param_groups.in_proj.weight.betas.1")), 0.75);
    EXPECT_FALSE(std::get<bool>(state.at("param_groups.in_proj.weight.amsgrad")));
    const auto& average = std::get<DTensor>(state.at("state.out_proj.weight.exp_avg"));
    const auto param = as_dtensor(net->out_proj->weight);
    EXPECT_EQ(average.device_mesh(), param.device_mesh());
    EXPECT_EQ(average.placements(), param.placements());
    EXPECT_EQ(average.sizes(), param.sizes());
    const auto* held = static_cast<torch::optim::AdamWParamState*>(
        optimizer.state().at(net->out_proj->weight.unsafeGetTensorImpl()).get());
    EXPECT_EQ(average.to_local().data_ptr(), held->exp_avg().data_ptr()) << "an alias";
  });
}

TEST(OptimizerStateDict, BeforeTheFirstStepShowsHowItWillStart) {
  run_ranks(2, [](int) {
    for (const auto& [name, make] : all_optimizers()) {
      SCOPED_TRACE(name);
      auto [net, untouched] = twins<Stack>(5);
      shard_stack(net);
      shard_stack(untouched);
      auto optimizer = make(net->parameters());
      auto other = make(untouched->parameters());
      const auto count = optimizer->state().size();
      const auto state = get_optimizer_state_dict(net, *optimizer);
      EXPECT_EQ(optimizer->state().size(), count) << "the optimizer does not change";
      if (name == "SGD without momentum") {
        EXPECT_TRUE(state.below("state.").empty());
      } else {
        EXPECT_FALSE(state.below("state.").empty());
      }
      // What it shows is how it starts: given back, nothing changes.
      set_optimizer_state_dict(net, *optimizer, state);
      for (int step = 0; step < 3; ++step) {
        EXPECT_EQ(train(net, *optimizer, step), train(untouched, *other, step));
      }
    }
  });
}

TEST(OptimizerStateDict, OfTheFrozenOnlyWhatExists) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(4);
    net->in_proj->weight.requires_grad_(false);
    fully_shard(net);
    optim::AdamW optimizer(net->parameters(), 1e-2);
    const auto train_once = [&] {
      net(random_batch(0, {2, 4})).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    train_once();
    auto state = get_optimizer_state_dict(net, optimizer);
    EXPECT_FALSE(state.contains("state.in_proj.weight.step"));
    EXPECT_TRUE(state.contains("param_groups.in_proj.weight.lr"));
    EXPECT_TRUE(state.contains("state.in_proj.bias.exp_avg"));
    set_optimizer_state_dict(net, optimizer, state);
    EXPECT_EQ(optimizer.state().size(), 3);
    const StateDictOptions ignoring{.ignore_frozen_params = true};
    const auto less = get_optimizer_state_dict(net, optimizer, ignoring);
    EXPECT_FALSE(less.contains("param_groups.in_proj.weight.lr"));
    EXPECT_THROW(set_optimizer_state_dict(net, optimizer, less), c10::ValueError);
    set_optimizer_state_dict(net, optimizer, less, ignoring);
    // Frozen later: its state is there, and is taken by an optimizer without it.
    net->in_proj->bias.requires_grad_(false);
    state = get_optimizer_state_dict(net, optimizer);
    EXPECT_TRUE(state.contains("state.in_proj.bias.exp_avg"));
    optim::AdamW fresh(net->parameters(), 1e-2);
    set_optimizer_state_dict(net, fresh, state);
    EXPECT_EQ(fresh.state().size(), 3);
  });
}

TEST(OptimizerStateDict, TiedParametersHaveOneName) {
  run_ranks(2, [](int) {
    auto net = seeded<Transformer>(ModelArgs{.dropout_p = 0});
    shard_transformer(net);
    optim::AdamW optimizer(net->parameters(), 1e-2); // lists it twice
    const auto state = get_optimizer_state_dict(net, optimizer);
    EXPECT_TRUE(state.contains("state.tok_embeddings.weight.exp_avg"));
    EXPECT_FALSE(state.contains("state.output.weight.exp_avg"));
    EXPECT_EQ(state.size(), 28 * (3 + 6));
    set_optimizer_state_dict(net, optimizer, state);
  });
}

// ------------------------------------------------------------ Round trips

TEST(OptimizerStateDict, MovesBetweenNumbersOfRanks) {
  constexpr int kSteps = 3;
  for (const auto& [name, make] : all_optimizers()) {
    for (const int from : {1, 2, 4}) {
      StateDict model, optimizer_state;
      std::vector<double> expected;
      run_ranks(from, [&, name = name, make = make](int rank) {
        SCOPED_TRACE(name);
        auto net = seeded<Stack>(5);
        shard_stack(net);
        auto optimizer = make(net->parameters());
        for (int step = 0; step < kSteps; ++step) {
          train(net, *optimizer, step);
        }
        const auto full_model = get_model_state_dict(net, kFull);
        const auto full_optimizer = get_optimizer_state_dict(net, *optimizer, kFull);
        EXPECT_EQ(full_optimizer.empty(), rank != 0);
        if (rank == 0) {
          model = full_model;
          optimizer_state = full_optimizer;
        }
        for (int step = kSteps; step < 2 * kSteps; ++step) {
          const auto loss = train(net, *optimizer, step);
          if (rank == 0) {
            expected.push_back(loss);
          }
        }
      });
      for (const int to : {1, 2, 4}) {
        for (const bool broadcast : {true, false}) {
          run_ranks(to, [&, name = name, make = make](int rank) {
            SCOPED_TRACE_OF(name, from, broadcast);
            auto net = unseeded<Stack>(5);
            shard_stack(net);
            auto optimizer = make(net->parameters());
            const StateDictOptions options{.broadcast_from_rank0 = broadcast};
            const bool brings = !broadcast || rank == 0;
            set_model_state_dict(net, brings ? model : StateDict(), options);
            set_optimizer_state_dict(
                net, *optimizer, brings ? optimizer_state : StateDict(), options);
            for (int step = kSteps; step < 2 * kSteps; ++step) {
              const auto loss = train(net, *optimizer, step);
              const auto wanted = expected[step - kSteps];
              if (from == to) {
                EXPECT_EQ(loss, wanted);
              } else { // reductions and kernels' tails round in another way
                EXPECT_NEAR(loss, wanted, 1e-4 * std::abs(wanted));
              }
            }
          });
        }
      }
    }
  }
}

TEST(OptimizerStateDict, ShardedOnHsdpAndOnTheHost) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"replicas", "shards"});
    const FullyShardOptions options{.mesh = mesh, .offload_policy = CPUOffloadPolicy{}};
    auto net = seeded<Stack>(5);
    shard_stack(net, options);
    torch::optim::Adam optimizer(net->parameters(), 1e-2);
    train(net, optimizer, 0);
    const auto model = copy_of(get_model_state_dict(net));
    const auto state = copy_of(get_optimizer_state_dict(net, optimizer));
    const auto& average = std::get<DTensor>(state.at("state.0.in_proj.weight.exp_avg"));
    EXPECT_EQ(average.device_mesh(), mesh);
    EXPECT_EQ(average.placements(), (std::vector<Placement>{Replicate{}, Shard{0}}));
    EXPECT_TRUE(average.to_local().is_cpu());
    const auto expected = train(net, optimizer, 1);

    auto resumed = unseeded<Stack>(5);
    shard_stack(resumed, options);
    torch::optim::Adam fresh(resumed->parameters(), 1e-3);
    set_model_state_dict(resumed, model);
    set_optimizer_state_dict(resumed, fresh, state);
    expect_same_state(get_optimizer_state_dict(resumed, fresh), state);
    EXPECT_EQ(train(resumed, fresh, 1), expected);
  });
}

// ------------------------------------------------------------ Values

TEST(OptimizerStateDict, HyperParametersGoByParameterNotByGroup) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(4);
    fully_shard(net);
    const auto make = [&](bool swapped, double lr) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      for (const bool biases : {swapped, !swapped}) {
        const auto& in = net->in_proj;
        const auto& out = net->out_proj;
        groups.emplace_back(
            biases ? Params{in->bias, out->bias} : Params{in->weight, out->weight},
            std::make_unique<torch::optim::AdamWOptions>(
                torch::optim::AdamWOptions(biases ? lr : 2 * lr).weight_decay(biases ? 0 : 0.5)));
      }
      return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(lr));
    };
    auto saved = make(false, 0.25);
    const auto state = get_optimizer_state_dict(net, *saved);
    auto swapped = make(true, 1e-3);
    auto& options = static_cast<torch::optim::AdamWOptions&>(swapped->param_groups()[0].options());
    set_optimizer_state_dict(net, *swapped, state);
    EXPECT_EQ(options.lr(), 0.25) << "the biases', by a reference that was held";
    EXPECT_EQ(options.weight_decay(), 0);
    EXPECT_EQ(swapped->param_groups()[1].options().get_lr(), 0.5);

    optim::AdamW one_group(net->parameters(), 1e-3);
    const auto message =
        message_of<c10::ValueError>([&] { set_optimizer_state_dict(net, one_group, state); });
    EXPECT_TRUE(contains(message, "'param_groups.in_proj.bias.lr' is 0.25"));
    EXPECT_TRUE(contains(message, "group 0 of this optimizer"));
    EXPECT_EQ(one_group.param_groups()[0].options().get_lr(), 1e-3);
    EXPECT_TRUE(one_group.state().empty());
  });
}

TEST(OptimizerStateDict, BringsTheTensorsThatItsOptionsNeed) {
  run_ranks(2, [](int) {
    auto net = seeded<Stack>(5);
    shard_stack(net);
    torch::optim::AdamW saved(net->parameters(), torch::optim::AdamWOptions(1e-2).amsgrad(true));
    torch::optim::SGD with_momentum(
        net->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
    train(net, saved, 0);
    train(net, with_momentum, 1);
    torch::optim::AdamW fresh(net->parameters(), 1e-3); // without amsgrad
    const auto state = get_optimizer_state_dict(net, saved);
    set_optimizer_state_dict(net, fresh, state);
    expect_same_state(get_optimizer_state_dict(net, fresh), state);
    torch::optim::SGD plain(net->parameters(), 1e-3);
    set_optimizer_state_dict(net, plain, get_optimizer_state_dict(net, with_momentum));
    train(net, plain, 2);
    EXPECT_EQ(plain.state().size(), 12);
  });
}

TEST(OptimizerStateDict, StepsMayBePythonsTensors) {
  run_ranks(2, [](int rank) {
    auto net = seeded<Stack>(5);
    shard_stack(net);
    torch::optim::Adam optimizer(net->parameters(), 1e-2);
    train(net, optimizer, 0);
    auto state = get_optimizer_state_dict(net, optimizer, kFull);
    if (rank == 0) {
      for (const auto& key : state.keys()) {
        if (key.ends_with(".step")) {
          state.set(key, torch::tensor(7.0F));
        }
      }
    }
    set_optimizer_state_dict(net, optimizer, state, kFromRank0);
    const auto now = get_optimizer_state_dict(net, optimizer);
    EXPECT_EQ(std::get<int64_t>(now.at("state.2.out_proj.bias.step")), 7);
  });
}

TEST(OptimizerStateDict, ValuesOfTheUserRideAlong) {
  run_ranks(2, [](int) {
    auto net = seeded<Stack>(5);
    shard_stack(net);
    torch::optim::SGD optimizer(net->parameters(), 1.0);
    torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.5);
    train(net, optimizer, 0);
    scheduler.step();
    scheduler.step();
    StateDict all;
    all.insert_all(get_model_state_dict(net), "model.");
    all.insert_all(get_optimizer_state_dict(net, optimizer), "optimizer.");
    all.insert("epoch", int64_t{2});
    const auto lr = optimizer.param_groups()[0].options().get_lr();
    EXPECT_LT(lr, 1.0);
    torch::optim::SGD resumed(net->parameters(), 1.0);
    set_model_state_dict(net, all.below("model."));
    set_optimizer_state_dict(net, resumed, all.below("optimizer."));
    EXPECT_EQ(resumed.param_groups()[0].options().get_lr(), lr);
  });
}

// ------------------------------------------------------------ Errors

TEST(OptimizerStateDict, NamesWhatDoesNotFitAndChangesNothing) {
  run_ranks(2, [](int) {
    auto [net, elsewhere] = twins<MLP>(4);
    torch::optim::Adagrad early(net->parameters()); // whose state is that of whole parameters
    fully_shard(net);
    torch::optim::LBFGS unknown(net->parameters());
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { get_optimizer_state_dict(net, unknown); }),
        "LBFGS is not supported"));
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { get_optimizer_state_dict(net, early); }),
        "'state.in_proj.weight.sum' has sizes [16, 4]"));
    optim::AdamW stranger({net->in_proj->weight, elsewhere->in_proj->weight}, 1e-2);
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { get_optimizer_state_dict(net, stranger); }),
        "parameter 1 of the optimizer's group 0, of sizes [16, 4], is not one of the module's"));

    optim::AdamW optimizer(net->parameters(), 1e-2);
    const auto before = get_optimizer_state_dict(net, optimizer);
    const auto with = [&](const std::string& key, StateDict::Value value) {
      auto state = copy_of(before);
      for (const auto& item : before) {
        if (item.second.index() < 2) {
          local_of(state.at(item.first)).fill_(1);
        }
      }
      state.set(key, std::move(value));
      return message_of<c10::ValueError>([&] { set_optimizer_state_dict(net, optimizer, state); });
    };
    EXPECT_TRUE(contains(
        with("state.in_proj.weight.step", 1.5),
        "'state.in_proj.weight.step' should be a whole number"));
    EXPECT_TRUE(contains(
        with("param_groups.in_proj.bias.lr", std::string("fast")),
        "'param_groups.in_proj.bias.lr' should be a number"));
    EXPECT_TRUE(contains(
        with("state.in_proj.weight.exp_avg", torch::zeros({4, 4})),
        "'state.in_proj.weight.exp_avg' has sizes [4, 4] in the state dict, here [16, 4]"));
    EXPECT_TRUE(contains(with("epoch", int64_t{1}), "unexpected keys: epoch"));
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { set_optimizer_state_dict(net, optimizer, {}); }),
        "missing keys: state.in_proj.weight.step"));
    EXPECT_TRUE(optimizer.state().empty());
    set_optimizer_state_dict(net, optimizer, {}, {.strict = false});
    EXPECT_TRUE(optimizer.state().empty());
    expect_same_state(get_optimizer_state_dict(net, optimizer), before);
  });
}

TEST(OptimizerStateDict, StepsThatAreNoNumbersOfStepsAreRefused) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(4);
    fully_shard(net);
    optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.1));
    for (const double step : {double{INFINITY}, 1e300}) {
      SCOPED_TRACE_OF(step);
      auto state = get_optimizer_state_dict(net, optimizer);
      state.set("state.in_proj.weight.step", step);
      message_of<c10::ValueError>([&] { set_optimizer_state_dict(net, optimizer, state); });
    }
  });
}

TEST(OptimizerStateDict, OneRankThatFailsStopsAll) {
  run_ranks(4, [](int rank) {
    auto net = seeded<Stack>(5);
    shard_stack(net);
    optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    train(net, optimizer, 0);
    const auto before = copy_of(get_optimizer_state_dict(net, optimizer));
    auto state = copy_of(before);
    for (const auto& [key, value] : state) {
      if (value.index() < 2) {
        local_of(value).zero_();
      }
    }
    if (rank == 1) { // found while the entries are made
      state.set("param_groups.1.in_proj.bias.momentum", 0.3);
    }
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { set_optimizer_state_dict(net, optimizer, state); }),
        rank == 1 ? "give it the groups of the one that was saved"
                  : "rank 1 cannot take its state dict"));
    expect_same_state(get_optimizer_state_dict(net, optimizer), before);
  });
}

} // namespace
} // namespace fsdp
