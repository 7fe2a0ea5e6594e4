// State dicts of models: names, order, aliasing, and what may be put back.
#include <fsdp/meta_init.h>
#include <fsdp/optim.h>

#include "checkpoint/state_dicts.h"

namespace fsdp {
namespace {

using namespace test;
using Keys = std::vector<std::string>;

struct PairImpl : torch::nn::Module {
  explicit PairImpl(int64_t dim)
      : first(register_module("0", MLP(dim))), second(register_module("1", linear(dim, dim))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return second(first(x));
  }
  MLP first;
  Linear second;
};
FSDP_MODULE(Pair);

/// Upstream's: Sequential(MLP, Sequential(MLP, Linear), MLP).
struct NestedImpl : torch::nn::Module {
  explicit NestedImpl(int64_t dim)
      : first(register_module("0", MLP(dim))),
        second(register_module("1", Pair(dim))),
        third(register_module("2", MLP(dim))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return third(second(first(x)));
  }
  MLP first;
  Pair second;
  MLP third;
};
FSDP_MODULE(Nested);

void shard(Nested& net, const FullyShardOptions& options) {
  fully_shard(net->first, options);
  fully_shard(net->second, options);
  fully_shard(net->third, options);
  fully_shard(net, options);
}

void shard(MLPStack& net, const FullyShardOptions& options) {
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, options);
  }
  fully_shard(net, options);
}

/// What Python's state_dict() of an unsharded model gives.
StateDict plain_state(const torch::nn::Module& module) {
  StateDict state;
  for (const auto& item : module.named_parameters()) {
    state.insert(item.key(), item.value().detach().clone());
  }
  return state;
}

void expect_full(const StateDict& state, const StateDict& expected) {
  ASSERT_EQ(state.keys(), expected.keys());
  for (const auto& [key, value] : state) {
    SCOPED_TRACE(key);
    const auto* placed = std::get_if<DTensor>(&value);
    EXPECT_SAME(placed ? placed->full_tensor() : local_of(value), local_of(expected.at(key)));
  }
}

/// Upstream's _test_state_dict_save_load.
void save_and_load(torch::nn::Module& net) {
  const auto params = net.named_parameters();
  std::vector<void*> pointers;
  for (const auto& item : params) {
    const auto placed = as_dtensor(item.value());
    placed.to_local().fill_(1);
    pointers.push_back(placed.to_local().data_ptr());
  }
  const auto state = get_model_state_dict(net);
  ASSERT_EQ(state.keys(), params.keys());
  StateDict other;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& [key, param] = std::pair(params[i].key(), params[i].value());
    const auto& placed = std::get<DTensor>(state.at(key));
    EXPECT_EQ(placed.to_local().data_ptr(), pointers[i]) << key;
    EXPECT_FALSE(placed.to_local().requires_grad());
    EXPECT_TRUE(param.requires_grad());
    EXPECT_EQ(placed.sizes(), as_dtensor(param).sizes());
    EXPECT_EQ(placed.device_mesh(), as_dtensor(param).device_mesh());
    other.insert(
        key, DTensor::from_local(
                 placed.to_local().clone().fill_(42 + get_rank()), placed.device_mesh(),
                 placed.placements(), placed.sizes().vec()));
  }
  for (const auto& item : params) {
    EXPECT_TRUE(as_dtensor(item.value()).to_local().eq(1).all().item<bool>());
  }
  set_model_state_dict(net, other);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto local = as_dtensor(params[i].value()).to_local();
    EXPECT_TRUE(local.eq(42 + get_rank()).all().item<bool>()) << params[i].key();
    EXPECT_EQ(local.data_ptr(), pointers[i]);
  }
}

// ------------------------------------------------------------ The dict

TEST(StateDicts, KeepOrderAndRefuseTwins) {
  StateDict state;
  state.insert("b", torch::ones({2}));
  state.insert("a", int64_t{3});
  state.insert("name", std::string("run"));
  EXPECT_EQ(state.keys(), (Keys{"b", "a", "name"}));
  EXPECT_THROW(state.insert("a", true), c10::ValueError);
  EXPECT_THROW((void)state.at("c"), c10::ValueError);
  state.set("a", 0.5);
  state.set("c", false);
  EXPECT_EQ(std::get<double>(state.at("a")), 0.5);
  EXPECT_EQ(state.size(), 4);

  StateDict all;
  all.insert("step", int64_t{1});
  all.insert_all(state, "model.");
  EXPECT_EQ(all.keys(), (Keys{"step", "model.b", "model.a", "model.name", "model.c"}));
  EXPECT_EQ(all.below("model.").keys(), state.keys());
  EXPECT_TRUE(local_of(all.at("model.b")).is_same(local_of(state.at("b")))) << "shared";
  EXPECT_THROW(all.insert_all(state, "model."), c10::ValueError);
  EXPECT_EQ(all.size(), 5);
  const auto copy = all;
  all.set("step", int64_t{2});
  EXPECT_EQ(std::get<int64_t>(copy.at("step")), 1);
}

// ------------------------------------------------------------ Get

TEST(ModelStateDict, SavesAndLoadsOnEveryLayout) {
  for (const int n : {1, 2, 3, 4}) {
    run_ranks(n, [n](int) {
      std::vector<DeviceMesh> meshes{init_device_mesh(test_device(), {n}, {"dp"})};
      if (n % 2 == 0) {
        meshes.push_back(init_device_mesh(test_device(), {n / 2, 2}, {"replicas", "shards"}));
      }
      for (const auto& mesh : meshes) {
        for (const int64_t dim : {2, 3, 4, 5, 16}) {
          SCOPED_TRACE(c10::str(mesh.str(), ", dim ", dim));
          FullyShardOptions options{.mesh = mesh};
          if (dim == 16) {
            if (dim % n != 0) {
              continue;
            }
            options.shard_placement_fn = [](const std::string&, const torch::Tensor& param) {
              return Shard{param.dim() > 1 && param.size(1) > param.size(0) ? 1 : 0};
            };
          }
          auto net = seeded<Nested>(dim);
          shard(net, options);
          save_and_load(*net);

          auto kept = seeded<Nested>(dim);
          const auto original = plain_state(*kept);
          options.reshard_after_forward = false;
          shard(kept, options);
          const auto before = copy_of(get_model_state_dict(kept));
          expect_full(before, original);
          kept(random_batch(0, {2, dim}));
          if (n > 1 && !options.shard_placement_fn) {
            EXPECT_EQ(kept->first->in_proj->weight.size(0), 4 * dim) << "still unsharded";
          }
          const auto after = get_model_state_dict(kept);
          expect_same_state(after, before);
          EXPECT_FALSE(n > 1 && FSDPModule::of(kept->first).is_unsharded());
          save_and_load(*kept);
        }
      }
    });
  }
}

TEST(ModelStateDict, StaysAnAliasWhileTraining) {
  run_ranks(2, [](int) {
    for (const int64_t dim : {2, 3, 4, 5}) {
      auto net = seeded<Linear>(torch::nn::LinearOptions(dim, dim).bias(false));
      fully_shard(net, {.reshard_after_forward = true});
      optim::AdamW optimizer(net->parameters(), 1e-2);
      const auto state = get_model_state_dict(net);
      const auto pointer = [](const StateDict& of) { return local_of(of.at("weight")).data_ptr(); };
      const auto train = [&](int step) {
        net(random_batch(step, {2, dim})).sum().backward();
        optimizer.step();
        optimizer.zero_grad();
      };
      for (int step = 0; step < 5; ++step) {
        train(step);
        EXPECT_EQ(as_dtensor(net->weight).to_local().data_ptr(), pointer(state));
        EXPECT_SAME(local_of(state.at("weight")), net->weight.detach());
      }
      net->to(torch::kDouble);
      net->to(torch::kFloat);
      optimizer.state().clear();
      if (net->weight.numel() > 0) {
        EXPECT_NE(pointer(get_model_state_dict(net)), pointer(state)) << "another storage";
      }
      train(5);
      EXPECT_SAME(local_of(get_model_state_dict(net).at("weight")), net->weight.detach());
    }
  });
}

TEST(ModelStateDict, OfTwoAxesIsThatOfTheUnsharded) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    for (const int64_t dim : {4, 6, 8, 10}) {
      auto net = seeded<MLPStack>(dim);
      const auto original = plain_state(*net);
      parallelize(net, mesh["tp"]);
      expect_full(get_model_state_dict(net), original);
      shard(net, {.mesh = mesh["dp"]});
      expect_full(get_model_state_dict(net), original);
      save_and_load(*net);
    }
  });
}

TEST(ModelStateDict, OfThreeAxes) {
  run_ranks(8, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2, 2}, {"replicas", "shards", "tp"});
    for (const int64_t dim : {4, 6, 8, 10}) {
      auto net = seeded<MLPStack>(dim);
      const auto original = plain_state(*net);
      parallelize(net, mesh["tp"]);
      shard(net, {.mesh = mesh[{"replicas", "shards"}]});
      expect_full(get_model_state_dict(net), original);
      const auto full = get_model_state_dict(net, kFull);
      EXPECT_EQ(full.empty(), get_rank() != 0);
      save_and_load(*net);
      set_model_state_dict(net, full, kFromRank0);
      expect_full(get_model_state_dict(net), original);
    }
  });
}

TEST(ModelStateDict, FullOnRank0InHostMemoryWithTiedKeysTwice) {
  run_ranks(2, [](int rank) {
    auto net = seeded<Transformer>(ModelArgs{.dropout_p = 0});
    const auto original = plain_state(*net);
    shard_transformer(net);
    const auto sharded = get_model_state_dict(net);
    EXPECT_EQ(sharded.size(), 29);
    EXPECT_EQ(sharded.keys().front(), "tok_embeddings.weight");
    EXPECT_EQ(sharded.keys().back(), "output.weight");
    EXPECT_EQ(
        local_of(sharded.at("output.weight")).data_ptr(),
        local_of(sharded.at("tok_embeddings.weight")).data_ptr());
    const auto full = get_model_state_dict(net, kFull);
    if (rank != 0) {
      EXPECT_TRUE(full.empty());
      return;
    }
    expect_same_state(full, original);
    for (const auto& item : full) {
      EXPECT_TRUE(std::get<torch::Tensor>(item.second).is_cpu());
    }
  });
}

TEST(ModelStateDict, FullIsACopyThatTrainingLeavesAlone) {
  run_ranks(2, [](int rank) {
    auto net = seeded<MLP>(4, true, /*with_buffer=*/true);
    fully_shard(net, {.ignored_params = {net->out_proj->bias}});
    const auto full = get_model_state_dict(net, {.full_state_dict = true});
    const auto before = copy_of(full);
    torch::NoGradGuard no_grad;
    for (const auto& tensor : {net->in_proj->weight, net->out_proj->bias, net->buffer}) {
      tensor.detach().add_(1);
    }
    expect_same_state(full, before);
    EXPECT_EQ(full.size(), rank == 0 ? 5 : 0);
  });
}

TEST(ModelStateDict, BuffersAndUnmanagedParametersAreTensors) {
  run_ranks(2, [](int rank) {
    auto net = seeded<MLP>(4, true, /*with_buffer=*/true);
    fully_shard(net, {.ignored_params = {net->out_proj->bias}});
    const auto state = get_model_state_dict(net);
    EXPECT_EQ(
        state.keys(), (Keys{
                          "buffer", "in_proj.weight", "in_proj.bias", "out_proj.weight",
                          "out_proj.bias"})); // Python's order
    const auto& bias = std::get<torch::Tensor>(state.at("out_proj.bias"));
    EXPECT_EQ(bias.data_ptr(), net->out_proj->bias.data_ptr());
    EXPECT_FALSE(bias.requires_grad());
    EXPECT_EQ(std::get<torch::Tensor>(state.at("buffer")).data_ptr(), net->buffer.data_ptr());
    EXPECT_TRUE(std::holds_alternative<DTensor>(state.at("in_proj.bias")));
    const auto original = copy_of(state);
    const auto full = get_model_state_dict(net, kFull);
    for (const auto& item : state) {
      local_of(item.second).zero_();
    }
    set_model_state_dict(net, full, kFromRank0);
    expect_same_state(get_model_state_dict(net), original);
    EXPECT_EQ(full.size(), rank == 0 ? 5 : 0);
  });
}

TEST(ModelStateDict, OfAPartHasNamesRelativeToIt) {
  run_ranks(2, [](int) {
    auto net = seeded<Nested>(4);
    fully_shard(net, {.reshard_after_forward = false});
    const auto part = get_model_state_dict(net->second);
    EXPECT_EQ(part.keys().front(), "0.in_proj.weight");
    EXPECT_EQ(part.size(), 6);
    net(random_batch(0, {2, 4}));
    // Its group is the root's, which nobody asked to be resharded.
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { set_model_state_dict(net->second, part); }),
        "'0.in_proj.weight' is unsharded; reshard()"));
    FSDPModule::of(net).reshard();
    set_model_state_dict(net->second, part);
  });
}

TEST(ModelStateDict, WithoutTheFrozen) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(4);
    net->in_proj->weight.requires_grad_(false);
    fully_shard(net);
    const StateDictOptions options{.ignore_frozen_params = true};
    const auto state = get_model_state_dict(net, options);
    EXPECT_EQ(state.keys(), (Keys{"in_proj.bias", "out_proj.weight", "out_proj.bias"}));
    EXPECT_THROW(set_model_state_dict(net, state), c10::ValueError);
    set_model_state_dict(net, state, options);
    EXPECT_EQ(get_model_state_dict(net).size(), 4);
  });
}

// ------------------------------------------------------------ Set

TEST(ModelStateDict, TakesWholeTensorsOfOtherDtypes) {
  run_ranks(3, [](int) {
    auto net = seeded<MLP>(5);
    auto other = seeded<MLP>(5);
    fully_shard(net);
    StateDict doubled;
    for (const auto& [key, value] : plain_state(*other)) {
      doubled.insert(key, local_of(value).to(torch::kDouble) * 2);
    }
    CommDebugMode comm;
    set_model_state_dict(net, doubled);
    EXPECT_EQ(comm.total(), comm.count("all_reduce")) << "only whether all can";
    expect_parity(
        *net, *[&] {
          torch::NoGradGuard no_grad;
          for (auto& param : other->parameters()) {
            param.mul_(2);
          }
          return &*other;
        }());
    net(random_batch(0, {2, 5})).sum().backward(); // versions and faces are in order
  });
}

TEST(ModelStateDict, ReachesWhatIsGatheredOrBeingGathered) {
  run_ranks(2, [](int) {
    for (const bool async_op : {false, true}) {
      auto net = seeded<MLP>(4);
      auto ones = seeded<MLP>(4);
      torch::NoGradGuard no_grad;
      for (auto& param : ones->parameters()) {
        param.fill_(1);
      }
      fully_shard(net, {.reshard_after_forward = false});
      net(random_batch(0, {2, 4}));
      if (async_op) {
        FSDPModule::of(net).reshard();
        FSDPModule::of(net).unshard(/*async_op=*/true);
      }
      set_model_state_dict(net, plain_state(*ones));
      const auto x = random_batch(1, {2, 4});
      EXPECT_CLOSE(net(x), ones(x));
    }
  });
}

TEST(ModelStateDict, TakesDTensorsPlacedInAnotherWay) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    const auto line = init_device_mesh(test_device(), {4}, {"line"});
    auto reference = seeded<MLPStack>(6);
    const auto original = plain_state(*reference);
    // What only tensor parallelism divided, and what only fully_shard did.
    auto by_tp = seeded<MLPStack>(6);
    parallelize(by_tp, mesh["tp"]);
    auto by_dp = seeded<MLPStack>(6);
    shard(by_dp, {.mesh = line});
    for (auto* from : {&by_tp, &by_dp}) {
      auto net = unseeded<MLPStack>(6);
      parallelize(net, mesh["tp"]);
      shard(net, {.mesh = mesh["dp"]});
      set_model_state_dict(net, get_model_state_dict(*from));
      expect_full(get_model_state_dict(net), original);
    }
    // On the same mesh.
    auto net = unseeded<MLPStack>(6);
    shard(net, {.mesh = line});
    StateDict replicated;
    for (const auto& [key, value] : original) {
      replicated.insert(key, DTensor::from_local(local_of(value), line, {Replicate{}}));
    }
    set_model_state_dict(net, replicated);
    expect_full(get_model_state_dict(net), original);
    // Into a model that nobody divided.
    auto plain = unseeded<MLPStack>(6);
    set_model_state_dict(plain, get_model_state_dict(by_dp));
    expect_same_state(plain_state(*plain), original);
  });
}

TEST(ModelStateDict, NamesWhatDoesNotFitAndChangesNothing) {
  run_ranks(2, [](int rank) {
    auto net = seeded<Transformer>(ModelArgs{.dropout_p = 0});
    auto state = plain_state(*net);
    shard_transformer(net);
    const auto before = copy_of(get_model_state_dict(net));
    const auto set = [&](const StateDict& given, const StateDictOptions& options = {}) {
      return message_of<c10::ValueError>([&] { set_model_state_dict(net, given, options); });
    };
    StateDict wrong;
    for (const auto& [key, value] : state) {
      wrong.insert(key, torch::zeros_like(local_of(value)));
    }
    wrong.set("norm.weight", torch::zeros({3}));
    wrong.set("norm.bias", 1.0);
    wrong.insert("spare", torch::zeros({1}));
    const auto message = set(wrong);
    for (const auto* part :
         {"[set_model_state_dict]", "unexpected keys: spare",
          "'norm.weight' has sizes [3] in the state dict, here [16]",
          "'norm.bias' should be a tensor", "Nothing was changed"}) {
      EXPECT_TRUE(contains(message, part));
    }
    EXPECT_TRUE(contains(message, c10::str("rank ", rank, ":")));
    EXPECT_TRUE(contains(set({}), "and 19 more (strict = false"));
    EXPECT_TRUE(contains(set(wrong, {.strict = false}), "'norm.weight' has sizes"));
    expect_same_state(get_model_state_dict(net), before);

    StateDict some;
    some.insert("norm.weight", torch::full({16}, 7.0));
    some.insert("spare", torch::zeros({1}));
    set_model_state_dict(net, some, {.strict = false});
    EXPECT_TRUE(as_dtensor(net->norm->weight).to_local().eq(7).all().item<bool>());
    EXPECT_SAME(net->norm->bias.detach(), local_of(before.at("norm.bias")));
  });
}

TEST(ModelStateDict, OneRankThatFailsStopsAll) {
  for (const bool two_axes : {false, true}) {
    run_ranks(4, [&](int rank) {
      auto net = seeded<MLPStack>(4);
      if (two_axes) {
        const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
        parallelize(net, mesh["tp"]);
        shard(net, {.mesh = mesh["dp"]});
      } else {
        shard(net, {});
      }
      const auto before = copy_of(get_model_state_dict(net));
      StateDict state;
      for (const auto& [key, value] : before) { // such that ranks have to communicate
        const auto& placed = std::get<DTensor>(value);
        state.insert(
            key,
            placed.redistribute(std::vector<Placement>(placed.placements().size(), Replicate{})));
        std::get<DTensor>(state.at(key)).to_local().zero_();
      }
      if (rank == 2) {
        state.insert("spare", 1.0);
      }
      EXPECT_TRUE(contains(
          message_of<c10::ValueError>([&] { set_model_state_dict(net, state); }),
          rank == 2 ? "rank 2: unexpected keys: spare" : "rank 2 cannot take its state dict"));
      expect_same_state(get_model_state_dict(net), before);
    });
  }
}

TEST(ModelStateDict, RanksThatBringDifferentKindsAreTold) {
  run_ranks(2, [](int rank) {
    auto net = seeded<MLP>(4);
    const auto whole = plain_state(*net);
    fully_shard(net);
    StateDict state;
    for (const auto& [key, value] : get_model_state_dict(net)) {
      state.insert(
          key, rank == 0 ? StateDict::Value(local_of(whole.at(key)))
                         : StateDict::Value(DTensor::from_local(
                               local_of(whole.at(key)), std::get<DTensor>(value).device_mesh(),
                               {Replicate{}})));
    }
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { set_model_state_dict(net, state); }),
        "some ranks bring DTensors under keys where others bring whole tensors"));
  });
}

TEST(ModelStateDict, FromRank0) {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"replicas", "shards"});
    auto net = seeded<Nested>(5);
    const auto original = plain_state(*net);
    shard(net, {.mesh = mesh});
    for (auto& param : net->parameters()) {
      as_dtensor(param).to_local().zero_();
    }
    StateDict nonsense; // those of the others do not count
    nonsense.insert("x", 1.0);
    set_model_state_dict(net, rank == 0 ? original : nonsense, kFromRank0);
    expect_full(get_model_state_dict(net), original);
    // What is wrong with rank 0's stops all of them.
    const auto message = [&](const StateDict& state) {
      return message_of<c10::ValueError>(
          [&] { set_model_state_dict(net, rank == 0 ? state : StateDict(), kFromRank0); });
    };
    EXPECT_TRUE(contains(message(nonsense), "unexpected keys: x"));
    EXPECT_TRUE(contains(message(get_model_state_dict(net)), "rank 0: '0.in_proj.weight' is a DT"));
    expect_full(get_model_state_dict(net), original);
  });
}

// ------------------------------------------------------------ Meta, offload

template <class Holder, class... Args>
Holder on_meta(const Args&... args) {
  const MetaInit meta;
  return Holder(args...);
}

TEST(ModelStateDict, Rank0FillsAModelOnMeta) {
  run_ranks(4, [](int rank) {
    const ModelArgs args{.dropout_p = 0};
    auto reference = seeded<Transformer>(args);
    const auto original = plain_state(*reference);
    auto net = on_meta<Transformer>(args);
    shard_transformer(net);
    EXPECT_TRUE(local_of(get_model_state_dict(net).at("norm.weight")).is_meta());
    const auto message = message_of<c10::ValueError>([&] { set_model_state_dict(net, original); });
    EXPECT_TRUE(contains(message, "no memory, on the meta device: tok_embeddings.weight"));
    EXPECT_TRUE(contains(message, "call fsdp::to_empty first"));
    EXPECT_THROW(get_model_state_dict(net, kFull), c10::ValueError);

    to_empty(net, test_device());
    set_model_state_dict(net, rank == 0 ? original : StateDict(), kFromRank0);
    expect_full(get_model_state_dict(net), original);
    train_and_compare(net, reference, transformer_loss, 2);
  });
}

TEST(ModelStateDict, OffloadedParametersOnMetaAreLoadedOneByOne) {
  run_ranks(2, [](int) {
    for (const bool pin_memory : {true, false}) {
      auto net = on_meta<DoubleLinear>(4, true);
      const FullyShardOptions options{.offload_policy = CPUOffloadPolicy{.pin_memory = pin_memory}};
      fully_shard(net->lin1, options);
      fully_shard(net->lin2, options);
      fully_shard(net, options);
      to_empty(net, test_device());
      StateDict all;
      for (const auto& item : net->named_parameters()) {
        const auto placed = as_dtensor(item.value());
        const auto value =
            torch::randn(placed.sizes(), generator(placed.sizes().size() + all.size()));
        const auto spread = distribute_tensor(value, placed.device_mesh(), placed.placements());
        StateDict one;
        one.insert(item.key(), spread);
        all.insert(item.key(), value);
        set_model_state_dict(net, one, {.strict = false});
      }
      net(random_batch(0, {2, 4}))[0].sum().backward();
      const auto state = get_model_state_dict(net);
      for (const auto& item : state) {
        EXPECT_TRUE(local_of(item.second).is_cpu());
      }
      expect_full(state, all);
    }
  });
}

// ------------------------------------------------------------ Random state

TEST(RandomState, IsOneRowPerRank) {
  {
    const auto state = get_random_state();
    const auto expected = torch::rand({8});
    set_random_state(state);
    EXPECT_SAME(torch::rand({8}), expected);
    StateDict wrong;
    wrong.insert("cpu", torch::zeros({3}));
    EXPECT_THROW(set_random_state(wrong), c10::ValueError);
  }
  run_ranks(2, [](int rank) {
    const auto state = get_random_state();
    const auto& placed = std::get<DTensor>(state.at("cpu"));
    EXPECT_EQ(placed.sizes()[0], 2);
    EXPECT_EQ(placed.to_local().size(0), 1);
    EXPECT_EQ(placed.device_mesh().get_local_rank(), rank);
  });
}

} // namespace
} // namespace fsdp
