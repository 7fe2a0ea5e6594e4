// A group built by hand: gather and reduce against the unsharded parameters.
#include "group/param_group.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fsdp/debug.h>
#include <fsdp/device_mesh.h>
#include <fsdp/distributed.h>
#include <torch/torch.h>

#include <set>

#include "support/tensors.h"

namespace fsdp::detail {
namespace {

using test::contains;
using test::message_of;

torch::Tensor random(uint64_t seed, at::IntArrayRef sizes) {
  return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}

DataParallelMesh world_mesh() {
  return DataParallelMesh(init_device_mesh(torch::kCPU, {get_world_size()}));
}

/// A group of parameters with seeded values, and those values.
struct Made {
  std::vector<torch::Tensor> whole;
  std::vector<torch::Tensor> params;
  std::shared_ptr<FSDPParamGroup> group;

  explicit Made(
      const std::vector<std::vector<int64_t>>& sizes,
      const std::vector<torch::ScalarType>& dtypes = {torch::kFloat},
      const std::vector<int64_t>& dims = {0},
      std::optional<torch::ScalarType> reduce_dtype = {}) {
    std::vector<ParamSpec> specs;
    for (size_t i = 0; i < sizes.size(); ++i) {
      whole.push_back(random(i, sizes[i]).to(dtypes[i % dtypes.size()]));
      params.push_back(whole.back().clone().set_requires_grad(true));
      specs.push_back({params.back(), "p" + std::to_string(i), dims[i % dims.size()]});
    }
    group = std::make_shared<FSDPParamGroup>(
        specs, world_mesh(), "test", GroupPolicy{.precision = {.reduce_dtype = reduce_dtype}});
  }

  /// What a backward ends with.
  void reduce_grads() {
    group->post_backward({});
    group->comm->reductions.finish_all();
    group->end_backward({});
  }

  void unshard() {
    group->unshard(UnshardFor::User);
    group->wait_for_unshard(UnshardFor::User);
  }

  torch::Tensor shard_of(size_t i, const torch::Tensor& full) {
    const auto& geometry = group->params()[i]->geometry();
    return full.narrow(geometry.dim, geometry.offset, geometry.shard_sizes[geometry.dim])
        .contiguous();
  }

  void expect_sharded() {
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_SAME(params[i].detach(), shard_of(i, whole[i]));
      EXPECT_TRUE(params[i].is_contiguous());
    }
  }

  void expect_unsharded() {
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_SAME(params[i].detach(), whole[i]);
    }
  }
};

const std::vector<std::vector<int64_t>> kManySizes{{17, 257}, {17},      {64, 312}, {64},
                                                   {64, 64},  {512, 64}, {256},     {64, 297}};

class ParamGroup : public testing::TestWithParam<int> {};

TEST_P(ParamGroup, GathersWhatItSharded) {
  run_ranks(GetParam(), [](int) {
    Made made(kManySizes);
    made.expect_sharded();
    for (int round = 0; round < 3; ++round) {
      made.unshard();
      EXPECT_TRUE(made.group->is_unsharded());
      made.expect_unsharded();
      made.group->unshard(UnshardFor::User); // no-op
      made.group->reshard(ReshardAfter::User);
      made.group->reshard(ReshardAfter::User);
      EXPECT_FALSE(made.group->is_unsharded());
      made.expect_sharded();
    }
  });
}

TEST_P(ParamGroup, GathersAmongNeighboursWhatForwardLeftThere) {
  const int n = GetParam();
  const int ranks = n > 8 ? 8 : n % 2 == 0 && n > 2 ? n / 2 : 0;
  if (ranks == 0) {
    GTEST_SKIP() << n << " ranks do not divide";
  }
  run_ranks(n, [&](int) {
    Made made(kManySizes);
    made.group->set_ranks_after_forward(ranks);
    for (int round = 0; round < 2; ++round) {
      made.group->pre_forward();
      made.expect_unsharded();
      made.group->post_forward();
      EXPECT_EQ(made.group->state(), ParamsState::Divided);
      made.expect_sharded();
      CommDebugMode comm;
      made.group->pre_backward();
      made.expect_unsharded();
      ASSERT_EQ(comm.total(), 1);
      EXPECT_NE(comm.calls()[0].group, default_group().name()); // n ranks were not needed
      made.reduce_grads();
      made.expect_sharded();
    }
  });
}

TEST_P(ParamGroup, ReducesGradientsToTheirShards) {
  const int n = GetParam();
  run_ranks(n, [&](int rank) {
    for (const auto reduce_dtype : {torch::kFloat, torch::kHalf}) {
      SCOPED_TRACE_OF(reduce_dtype);
      Made made(kManySizes, {torch::kFloat}, {0}, reduce_dtype);
      made.unshard();
      torch::Tensor loss = torch::zeros({});
      for (const auto& param : made.params) {
        loss = loss + (param * static_cast<double>(rank % 8)).sum();
      }
      loss.backward();
      made.reduce_grads();
      EXPECT_FALSE(made.group->is_unsharded());
      double mean = 0;
      for (int r = 0; r < n; ++r) {
        mean += r % 8;
      }
      mean /= n;
      for (size_t i = 0; i < made.params.size(); ++i) {
        const auto expected = made.shard_of(i, torch::full_like(made.whole[i], mean));
        EXPECT_TRUE(torch::allclose(made.params[i].grad(), expected, 1e-3, 1e-3));
        EXPECT_EQ(made.params[i].grad().scalar_type(), torch::kFloat);
        EXPECT_EQ(made.params[i].grad().sizes(), made.params[i].sizes());
        EXPECT_TRUE(made.params[i].grad().is_contiguous());
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    WorldSizes, ParamGroup, testing::Values(1, 2, 3, 4, 8, 128), testing::PrintToStringParamName());

/// One training step per `step`, sharded and not, compared in every parameter.
void train_and_compare(
    Made& made,
    const std::function<torch::Tensor(const std::vector<torch::Tensor>&, int)>& loss_of) {
  const int n = get_world_size();
  std::vector<torch::Tensor> reference;
  for (const auto& whole : made.whole) {
    reference.push_back(whole.clone().set_requires_grad(true));
  }
  torch::optim::AdamW sharded_optimizer(made.params, 1e-2);
  torch::optim::AdamW optimizer(reference, 1e-2);
  for (int step = 0; step < 5; ++step) {
    made.unshard();
    auto loss = loss_of(made.params, 100 * step + get_rank());
    made.group->reshard(ReshardAfter::User); // after forward
    made.unshard();                          // for backward
    loss.backward();
    made.reduce_grads();
    torch::Tensor total = torch::zeros({});
    for (int rank = 0; rank < n; ++rank) {
      total = total + loss_of(reference, 100 * step + rank);
    }
    (total / n).backward();
    for (size_t i = 0; i < reference.size(); ++i) {
      EXPECT_TRUE(
          torch::allclose(made.params[i].grad(), made.shard_of(i, reference[i].grad()), 1e-5, 1e-6))
          << "gradient " << i << " in step " << step;
    }
    sharded_optimizer.step();
    optimizer.step();
    sharded_optimizer.zero_grad();
    optimizer.zero_grad();
    for (size_t i = 0; i < reference.size(); ++i) {
      EXPECT_TRUE(torch::allclose(
          made.params[i].detach(), made.shard_of(i, reference[i].detach()), 1e-5, 1e-6))
          << "parameter " << i << " in step " << step;
    }
  }
}

torch::Tensor two_layers(const std::vector<torch::Tensor>& p, int seed) {
  const auto x = random(1000 + seed, {4, 6});
  return torch::gelu(x.matmul(p[0].t()) + p[1]).matmul(p[2].t()).pow(2).mean();
}

class Training : public testing::TestWithParam<int> {};

TEST_P(Training, EqualsTheUnshardedModel) {
  run_ranks(GetParam(), [](int) {
    Made made({{10, 6}, {10}, {3, 10}});
    train_and_compare(made, two_layers);
  });
}

TEST_P(Training, EqualsItWithShardsOfOtherDims) {
  run_ranks(GetParam(), [](int) {
    Made made({{12, 6}, {12}, {5, 12}}, {torch::kFloat}, {0, 0, -1});
    if (12 % get_world_size() == 0) {
      train_and_compare(made, two_layers);
    }
  });
}

TEST_P(Training, EqualsItWithSeveralDtypesInOneGroup) {
  run_ranks(GetParam(), [](int) {
    Made made({{9, 6}, {9}, {3, 9}}, {torch::kFloat, torch::kDouble, torch::kFloat});
    made.expect_sharded();
    train_and_compare(made, [](const auto& p, int seed) {
      const auto x = random(1000 + seed, {4, 6});
      return torch::gelu(x.matmul(p[0].t()) + p[1].to(torch::kFloat))
          .matmul(p[2].t())
          .pow(2)
          .mean();
    });
  });
}

INSTANTIATE_TEST_SUITE_P(
    WorldSizes, Training, testing::Values(1, 2, 3, 4), testing::PrintToStringParamName());

TEST(ParamGroup, AccumulatesUntilReduced) {
  run_ranks(2, [](int) {
    Made made({{3, 2}});
    for (int microbatch = 0; microbatch < 3; ++microbatch) {
      made.unshard();
      (made.params[0] * 2).sum().backward();
      made.group->reshard(ReshardAfter::User); // without communication: the gradient stays
    }
    made.reduce_grads();
    EXPECT_SAME(made.params[0].grad(), torch::full_like(made.params[0].grad(), 6.0));
    made.unshard();
    made.params[0].sum().backward();
    made.reduce_grads(); // and adds to what is there
    EXPECT_SAME(made.params[0].grad(), torch::full_like(made.params[0].grad(), 7.0));
    made.reduce_grads(); // nothing left: no collective
  });
}

TEST(ParamGroup, ReducesStridedGradientsOfSeveralDtypesBitForBit) {
  run_ranks(3, [](int rank) {
    const auto grads_of = [&](bool strided) {
      Made made({{5, 7}, {4, 3}, {6, 2}}, {torch::kFloat, torch::kDouble, torch::kBFloat16});
      made.unshard();
      torch::Tensor loss = torch::zeros({}, torch::kDouble);
      for (size_t i = 0; i < made.params.size(); ++i) {
        const auto& param = made.params[i];
        param.register_hook([strided](const torch::Tensor& grad) {
          const auto other_way = grad.t().contiguous().t();
          EXPECT_FALSE(other_way.is_contiguous());
          return strided ? other_way : grad.contiguous();
        });
        const auto factors = random(10 * rank + i, param.sizes());
        loss = loss + (param.to(torch::kDouble) * factors).sum();
      }
      loss.backward();
      made.reduce_grads();
      std::vector<torch::Tensor> grads;
      for (const auto& param : made.params) {
        grads.push_back(param.grad());
      }
      return grads;
    };
    const auto strided = grads_of(true);
    const auto expected = grads_of(false);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_SAME(strided[i], expected[i]) << "parameter " << i;
    }
  });
}

TEST(ParamGroup, LeavesOutFrozenAndUnusedParameters) {
  run_ranks(3, [](int) {
    Made made({{4, 2}, {5}, {2, 2}});
    made.params[0].set_requires_grad(false);
    made.unshard();
    made.params[1].sum().backward();
    made.reduce_grads();
    EXPECT_FALSE(made.params[0].grad().defined());
    EXPECT_SAME(made.params[1].grad(), torch::ones_like(made.params[1].grad()));
    EXPECT_FALSE(made.params[2].grad().defined());
  });
}

TEST(ParamGroup, DividesAsAsked) {
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [&](int) {
      for (const auto reduce_dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
        for (const bool force_sum : {false, true}) {
          for (const std::optional<double> factor : {std::optional<double>(), {2.0}, {8.0}}) {
            SCOPED_TRACE_OF(reduce_dtype, force_sum, factor);
            Made made({{4, 2}}, {torch::kFloat}, {0}, reduce_dtype);
            made.group->reducer().force_sum = force_sum;
            made.group->reducer().gradient_divide_factor = factor;
            made.unshard();
            (made.params[0] * 8).sum().backward();
            made.reduce_grads();
            const auto expected = 8.0 * n / factor.value_or(n);
            EXPECT_SAME(made.params[0].grad(), torch::full_like(made.params[0].grad(), expected));
          }
        }
      }
    });
  }
}

TEST(ParamGroup, FreesTheWholeAndSaysSoWhenTouched) {
  run_ranks(2, [](int) {
    Made made({{4, 2}});
    made.unshard();
    const auto alias = made.params[0].detach();
    EXPECT_EQ(alias.sizes(), (std::vector<int64_t>{4, 2}));
    made.group->reshard(ReshardAfter::User);
#if TORCH_VERSION_MINOR >= 13
    EXPECT_TRUE(contains(
        message_of<c10::Error>([&] { alias.sum(); }), "parameters of module 'test' are resharded"));
#endif
  });
}

TEST(ParamGroup, AloneItNeedsNoSecondCopy) {
  run_ranks(1, [](int) {
    Made made({{4, 2}});
    const auto* storage = made.params[0].storage().unsafeGetStorageImpl();
    made.unshard();
    EXPECT_EQ(made.params[0].storage().unsafeGetStorageImpl(), storage);
    made.expect_unsharded();
  });
}

TEST(ParamGroup, KeptParametersStayOutdatedUntilTheyAreGathered) {
  run_ranks(2, [](int) {
    Made made({{4, 2}});
    made.group->reshard_after_backward = false;
    made.unshard();
    made.params[0].sum().backward();
    made.reduce_grads();
    EXPECT_EQ(made.group->state(), ParamsState::Outdated);
    {
      torch::NoGradGuard no_grad;
      made.params[0].mul_(2); // an optimizer's step
      made.whole[0].mul_(2);
    }
    made.group->end_backward({.is_last = false}); // of a microbatch that did not use the group
    EXPECT_EQ(made.group->state(), ParamsState::Outdated);
    made.group->pre_forward();
    made.expect_unsharded();
  });
}

TEST(ParamGroup, ReshardLeavesAGatherAmongNeighboursAlone) {
  run_ranks(4, [](int) {
    Made made(kManySizes);
    made.group->set_ranks_after_forward(2);
    made.group->pre_forward();
    made.group->post_forward();
    made.group->prefetch(UnshardFor::BackwardPrefetch);
    made.group->reshard(ReshardAfter::User);
    EXPECT_EQ(made.group->state(), ParamsState::Gathering);
    made.expect_sharded();
    made.group->pre_backward();
    made.expect_unsharded();
    made.reduce_grads();
    made.expect_sharded();
  });
}

TEST(ParamsState, ChangesAlongTheArrowsOnly) {
  using enum ParamsState;
  const std::vector<ParamsState> states{Sharded, Gathering, Unsharded, KeptForGraph,
                                        Kept,    Outdated,  Divided};
  const std::set<std::pair<ParamsState, ParamsState>> arrows{
      {Sharded, Gathering}, {Divided, Gathering},      {Gathering, Unsharded},
      {Kept, Unsharded},    {Unsharded, Kept},         {Kept, Outdated},
      {Unsharded, Divided}, {Unsharded, KeptForGraph}, {KeptForGraph, Kept}};
  for (const auto from : states) {
    for (const auto to : states) {
      SCOPED_TRACE(std::string(to_string(from)) + " to " + to_string(to));
      const auto change = [&] { check_transition(from, to, "layers.3"); };
      if (to == Sharded || arrows.contains({from, to})) {
        change();
      } else {
        EXPECT_TRUE(contains(message_of<c10::Error>(change), "group 'layers.3' cannot become"));
      }
    }
  }
}

TEST(ParamGroup, RefusesWithNames) {
  run_ranks(2, [](int) {
    const auto refused = [](const std::vector<ParamSpec>& specs, const std::string& part) {
      const auto message =
          message_of<c10::ValueError>([&] { FSDPParamGroup(specs, world_mesh(), "layer.3"); });
      EXPECT_TRUE(contains(message, part));
    };
    refused({}, "'layer.3' has no parameters");
    refused({{torch::ones({}), "scale", 0}}, "Change scale to a 1D tensor");
    refused(
        {{torch::ones({2}), "a", 0}, {torch::ones({2}, torch::kMeta), "b", 0}},
        "'a' on cpu, 'b' on meta");
  });
}

} // namespace
} // namespace fsdp::detail
