// State dicts of models: names, order and aliasing.
#include <fsdp/optim.h>

#include "checkpoint/model_state_dicts.h"

namespace fsdp {
namespace {

using namespace test;
using Keys = std::vector<std::string>;

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
        for (const int64_t dim : {2, 3, 4, 5, 7, 16}) {
          SCOPED_TRACE(c10::str(mesh.str(), ", dim ", dim));
          FullyShardOptions options{.mesh = mesh};
          if (dim == 7) {
            options.shard_placement_fn = [](const std::string&, const torch::Tensor& param) {
              return BlockShard{param.dim()};
            };
          }
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
      SCOPED_TRACE_OF(dim);
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
      SCOPED_TRACE_OF(dim);
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
      SCOPED_TRACE_OF(dim);
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
