// What may be put into a model by its state dict.
#include <fsdp/meta_init.h>

#include "checkpoint/model_state_dicts.h"

namespace fsdp {
namespace {

using namespace test;

TEST(ModelStateDict, TakesWholeTensorsOfOtherDtypes) {
  run_ranks(3, [](int) {
    auto [net, other] = twins<MLP>(5);
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
      SCOPED_TRACE_OF(async_op);
      auto [net, ones] = twins<MLP>(4);
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
      SCOPED_TRACE(from == &by_tp ? "by tp" : "by dp");
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
      SCOPED_TRACE_OF(two_axes);
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
    EXPECT_TRUE(contains(message, "call to_empty first"));
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
      SCOPED_TRACE_OF(pin_memory);
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

} // namespace
} // namespace fsdp
