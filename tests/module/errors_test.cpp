// What is refused, when, and with which words.
#include <fsdp/call.h>
#include <fsdp/debug.h>
#include <fsdp/error.h>
#include <fsdp/tie_weights.h>

#include "module/lambda.h"

namespace fsdp {
namespace {

using namespace test;

FSDP_MODULE_IMPL(List, torch::nn::ModuleListImpl);
FSDP_MODULE_IMPL(Conv2d, torch::nn::Conv2dImpl);

struct PairImpl : torch::nn::Module {
  PairImpl() : a(register_module("a", linear(4, 4))), b(register_module("b", linear(4, 4))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return b(torch::relu(a(x)));
  }
  Linear a, b;
};
FSDP_MODULE(Pair);

template <class Error = c10::ValueError, class Statement>
void refused(Statement statement, const std::vector<std::string>& parts) {
  const auto message = message_of<Error>(statement);
  for (const auto& part : parts) {
    EXPECT_TRUE(contains(message, part));
  }
}

TEST(FullyShardErrors, ModulesThatCannotBeSharded) {
  run_ranks(2, [](int) {
    Pair net;
    refused(
        [&] { fully_shard(torch::nn::Linear(2, 2)); },
        {"torch::nn::LinearImpl is not hooked", "FSDP_MODULE", "fsdp::nn", "by_call"});
    refused([&] { fully_shard(List()); }, {"does not support containers", "ModuleListImpl"});
    refused([&] { fully_shard(torch::nn::ModuleDict()); }, {"does not support containers"});
    refused(
        [&] { fully_shard(by_call(torch::nn::ModuleList())); }, {"does not support containers"});
    refused([&] { fully_shard(std::vector<Pair>()); }, {"the list of modules is empty"});
    refused([&] { fully_shard(std::shared_ptr<PairImpl>()); }, {"null pointer"});
    fully_shard(net);
    refused([&] { fully_shard(net); }, {"can only be applied to a module once", "PairImpl"});
    refused([&] { fully_shard({net, Pair()}); }, {"can only be applied to a module once"});
    refused<c10::Error>([&] { net->clone(); }, {"does not support deepcopy", "PairImpl"});
    refused([&] { FSDPModule::of(Pair()); }, {"Expects FSDPModule", "PairImpl"});
    static_assert(!std::is_constructible_v<ModuleRef, std::nullptr_t>);
    const Hooked<PairImpl> copy(static_cast<const PairImpl&>(*net)); // is not sharded
    EXPECT_EQ(copy.fsdp_state, nullptr);
  });
}

TEST(FullyShardErrors, ContainersThatHaveAForwardAreNot) {
  struct CallableListImpl : torch::nn::ModuleListImpl {
    CallableListImpl() : ModuleListImpl() {
      push_back(linear(2, 2));
    }
    torch::Tensor forward(const torch::Tensor& x) {
      return at<Linear::Impl>(0).forward(x);
    }
  };
  run_ranks(2, [](int) {
    Holder<CallableListImpl> list(std::make_shared<Hooked<CallableListImpl>>());
    fully_shard(list);
    list(torch::ones({1, 2})).sum().backward();
  });
}

TEST(FullyShardErrors, MeshesThatDoNotFit) {
  run_ranks(4, [](int) {
    Pair net;
    const auto cube = init_device_mesh(torch::kCPU, {4, 1, 1}, {"a", "b", "c"});
    refused(
        [&] { fully_shard(net, {.mesh = cube}); },
        {"expects a 1D or 2D DeviceMesh", "a=4, b=1, c=1"});
    const auto unnamed = init_device_mesh(torch::kCPU, {2, 2});
    refused([&] { fully_shard(net, {.mesh = unnamed}); }, {"mesh_dim_names specified"});
    EXPECT_FALSE(is_fsdp_module(net));
    EXPECT_EQ(net->a->weight.size(0), 4); // untouched
  });
}

TEST(FullyShardErrors, MeshesWithoutNamesAreRefusedByNameOfModuleAndParameter) {
  run_ranks(4, [](int) {
    auto net = seeded<MLP>(4);
    const auto grid = init_device_mesh(test_device(), {2, 2});
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { fully_shard(net, {.mesh = grid}); }), "MLPImpl"));
    const auto line = init_device_mesh(test_device(), {4}, {"dp"});
    const auto place = [&](const std::string& name,
                           const at::Tensor&) -> std::optional<ShardPlacement> {
      return name == "out_proj.weight" ? std::optional(ShardPlacement{.dim = 0, .mesh = grid})
                                       : std::nullopt;
    };
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>(
            [&] { fully_shard(net, {.mesh = line, .shard_placement_fn = place}); }),
        "out_proj.weight"));
  });
}

TEST(FullyShardErrors, ReshardsThatDoNotDivide) {
  run_ranks(4, [](int) {
    Pair net;
    for (const int ranks : {3, 0, -1, 8}) {
      refused(
          [&] { fully_shard(net, {.reshard_after_forward = ranks}); },
          {"reshard_after_forward = " + std::to_string(ranks), "should be a factor of", "4"});
    }
    EXPECT_EQ(net->a->weight.size(0), 4);
    static_assert(!std::is_convertible_v<double, ReshardAfterForward>);
    static_assert(!std::is_convertible_v<const char*, ReshardAfterForward>);
    // 1 keeps, 4 frees.
    const auto gathers_in_backward = [&](int ranks) {
      Pair each;
      fully_shard(each, {.reshard_after_forward = ranks});
      auto loss = each(torch::ones({1, 4})).sum();
      CommDebugMode comm;
      loss.backward();
      return comm.count("all_gather");
    };
    EXPECT_EQ(gathers_in_backward(1), 0);
    EXPECT_EQ(gathers_in_backward(4), 1);
    EXPECT_EQ(gathers_in_backward(2), 1);
  });
}

struct ScalarImpl : torch::nn::Module {
  ScalarImpl() : scalar_p(register_parameter("scalar_p", torch::ones({}))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return x * scalar_p;
  }
  torch::Tensor scalar_p;
};
FSDP_MODULE(Scalar);

TEST(FullyShardErrors, ParametersThatCannotBeSharded) {
  run_ranks(4, [](int) {
    refused([&] { fully_shard(Scalar()); }, {"Change scalar_p to a 1D tensor"});
    Conv2d conv(torch::nn::Conv2dOptions(2, 4, 3));
    conv->weight.set_data(conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    refused<c10::NotImplementedError>(
        [&] { fully_shard(conv); }, {"does not support non-contiguous parameters", "'weight'"});
    const auto along = [](int64_t dim) {
      return FullyShardOptions{
          .shard_placement_fn = [dim](const std::string&, const torch::Tensor&) {
            return Shard{dim};
          }};
    };
    refused(
        [&] { fully_shard(linear(8, 8), along(1)); },
        {"Shard dim 1 is invalid for 1D tensor", "'bias'"});
  });
}

TEST(FullyShardErrors, TiedWeightsInTwoGroups) {
  run_ranks(2, [](int) {
    auto net = seeded<Transformer>(ModelArgs{.dropout_p = 0});
    fully_shard(net->tok_embeddings);
    refused(
        [&] { fully_shard(net->output); },
        {"already managed by another FSDP group", "'weight'", "one call of fully_shard"});
    // The root has it below itself, and takes what is left.
    fully_shard(net);
  });
}

TEST(FullyShardErrors, ATiedWeightOutsideOfItsGroup) {
  run_ranks(2, [](int) {
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE_OF(reshard);
      auto net = seeded<Transformer>(ModelArgs{.dropout_p = 0});
      fully_shard(net->tok_embeddings, {.reshard_after_forward = reshard});
      fully_shard(net, {.reshard_after_forward = reshard});
      EXPECT_TRUE(contains(
          message_of<c10::ValueError>([&] { net(random_tokens(0, {2, 16}, 8)); }),
          "'output.weight' is shared with 'tok_embeddings.weight', which is already managed by "
          "another FSDP group"));
    }
  });
}

TEST(FullyShardErrors, WeightsThatAreTiedByTheMemberAlone) {
  run_ranks(2, [](int) {
    Pair net;
    net->b->weight = net->a->weight;
    refused([&] { fully_shard(net); }, {"'b.weight' is another tensor", "fsdp::tie_weights"});
    tie_weights(net->b, net->a);
    EXPECT_TRUE(net->b->named_parameters()["weight"].is_same(net->a->weight));
    fully_shard(net);
    net(torch::ones({1, 4})).sum().backward();
    Pair other;
    refused([&] { tie_weights(other->a, net->a); }, {"sharded already"});
    refused([&] { tie_weights(other->a, linear(3, 3)); }, {"sizes [4, 4]", "[3, 3]"});
  });
}

TEST(FullyShardErrors, AnInnerModuleThatRanFirst) {
  run_ranks(2, [](int) {
    Pair net;
    fully_shard(net->a);
    fully_shard(net->b);
    fully_shard(net);
    net->a(torch::ones({1, 4}));
    refused<c10::Error>(
        [&] { net(torch::ones({1, 4})); },
        {"already been lazily initialized for a",
         "requires running forward through the root module first"});
  });
}

TEST(FullyShardErrors, ModelsThatDifferBetweenRanks) {
  const auto message = message_of<CommError>([] {
    run_ranks(2, [](int rank) {
      auto net = linear(8, rank == 0 ? 4 : 6); // gathered, both take as much room
      fully_shard(net);
      const torch::NoGradGuard no_grad;
      net(torch::ones({1, 8}));
    });
  });
  EXPECT_TRUE(contains(message, "the ranks brought different calls"));
}

TEST(FullyShardErrors, AGroupOfSeveralModulesAsTheRoot) {
  run_ranks(2, [](int) {
    Pair net;
    fully_shard({net->a, net->b});
    refused<c10::Error>(
        [&] { net(torch::ones({1, 4})); }, {"requires a single root module", "2 modules"});
    fully_shard(net);
    net(torch::ones({1, 4})).sum().backward();
  });
}

struct OnMetaImpl : torch::nn::Module {
  OnMetaImpl()
      : weight(register_parameter("weight", torch::empty({4, 4}, torch::kMeta))),
        lin(register_module("lin", linear(4, 4))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return lin(x.matmul(weight));
  }
  torch::Tensor weight;
  Linear lin;
};
FSDP_MODULE(OnMeta);

TEST(FullyShardErrors, ParametersOnMeta) {
  run_ranks(2, [](int) {
    OnMeta net;
    fully_shard(net->lin);
    auto root = fully_shard(net);
    for (int attempt = 0; attempt < 2; ++attempt) {
      refused<c10::Error>(
          [&] { net(torch::ones({1, 4})); }, {"materialized from meta device", "['weight']"});
    }
    refused<c10::Error>([&] { root.unshard(); }, {"still on meta device", "weight"});
  });
}

TEST(FullyShardErrors, HalfAModelOnMetaIsRefusedBeforeAnythingChanges) {
  run_ranks(2, [](int) {
    auto net = seeded<Stack>(4, 2);
    auto& late = net->mlps[1]->in_proj->bias;
    late.set_requires_grad(false);
    late.unsafeGetTensorImpl()->shallow_copy_from(
        torch::empty_like(late, torch::kMeta).getIntrusivePtr());
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { fully_shard(net); }), "'1.in_proj.bias' is on the meta"));
    EXPECT_FALSE(is_fsdp_module(net));
    EXPECT_EQ(net->mlps[0]->in_proj->weight.sizes(), (std::vector<int64_t>{16, 4}));
  });
}

TEST(FullyShardErrors, Setters) {
  run_ranks(2, [](int) {
    Pair net;
    auto child = fully_shard(net->a);
    auto root = fully_shard(net);
    refused([&] { root.set_reduce_scatter_max_input_buffers(0); }, {"must be a positive int"});
    root.set_reduce_scatter_max_input_buffers(2);
    constexpr auto takes = []<class T>(T) {
      return requires(FSDPModule m, T value) { m.set_reduce_scatter_max_input_buffers(value); };
    };
    static_assert(takes(1) && !takes(true) && !takes(2.5));
    refused([&] { root.set_gradient_divide_factor(0); }, {"not positive"});
    refused([&] { root.set_custom_all_gather(nullptr); }, {"null pointer"});
    root.reset_iter_state(); // before the first forward
    child.reset_iter_state();
    net(torch::ones({1, 4})).sum().backward();
    refused<c10::Error>([&] { child.reset_iter_state(); }, {"must be called on the root", "'a'"});
    auto handle = [] {
      Pair gone;
      return fully_shard(gone);
    }();
    refused<c10::Error>([&] { handle.unshard(); }, {"the module of this handle is gone"});
    refused([&] { as_dtensor(torch::ones({2})); }, {"not a parameter that fully_shard manages"});
    refused([&] { as_dtensor_grad(net->b->weight.detach()); }, {"not a parameter"});
  });
}

TEST(FullyShardErrors, AFailedCallChangesNothing) {
  run_ranks(4, [](int) {
    auto net = seeded<MLP>(6);
    const auto pairs = init_device_mesh(test_device(), {2, 2}, {"a", "b"})["b"];
    EXPECT_THROW(
        fully_shard(
            net, {.shard_placement_fn = [&](const std::string& name,
                                            const torch::Tensor&) -> std::optional<ShardPlacement> {
              return name == "out_proj.bias" ? ShardPlacement{.dim = 3, .mesh = pairs}
                                             : ShardPlacement(Shard{0});
            }}),
        c10::ValueError);
    EXPECT_EQ(net->in_proj->weight.size(0), 24);
    EXPECT_FALSE(is_fsdp_module(net));
    fully_shard(net);
  });
}

TEST(FullyShardErrors, TheNameOfAReturnedParameterIsItsOwn) {
  run_ranks(2, [](int) {
    auto net = seeded<Lambda>(
        [](Linear& lin, const torch::Tensor&) { return std::vector{lin->bias.view({2, 3})}; });
    fully_shard(net);
    refused<c10::Error>([&] { net(lambda_input()); }, {"returns its parameter 'lin.bias'"});
  });
}

TEST(Names, AreFromTheRoot) {
  run_ranks(2, [](int) {
    struct NestImpl : torch::nn::Module {
      NestImpl() : first(register_module("0", MLP(8))), second(register_module("1", MLP(8))) {}
      torch::Tensor forward(const torch::Tensor& x) {
        return second(first(x));
      }
      MLP first, second;
    };
    Holder<NestImpl> net(std::make_shared<Hooked<NestImpl>>());
    fully_shard(net->first->in_proj);
    fully_shard(net->first->out_proj);
    fully_shard(net);
    EventLog log;
    CommDebugMode comm;
    net(torch::ones({1, 8}));
    EXPECT_EQ(
        log.lines(),
        (std::vector<std::string>{
            "unshard  FORWARD", "unshard 0.in_proj FORWARD", "reshard 0.in_proj FORWARD",
            "unshard 0.out_proj FORWARD", "reshard 0.out_proj FORWARD"}));
    EXPECT_EQ(comm.calls()[1].module, "0.in_proj");
    EXPECT_EQ(detail::FSDPParam::find(net->second->in_proj->weight)->name(), "1.in_proj.weight");
  });
}

TEST(Names, ParametersThatAppearLaterAreWarnedOf) {
  struct Warnings : c10::WarningHandler {
    void process(const c10::Warning& warning) override {
      text += warning.msg();
    }
    std::string text;
  } warnings;
  run_ranks(2, [&](int rank) {
    Pair net;
    fully_shard(net, {.ignored_params = {net->a->bias}});
    net->register_parameter("late", torch::ones({2}));
    if (rank == 0) {
      c10::WarningUtils::set_warning_handler(&warnings);
    }
    net(torch::ones({1, 4}));
    if (rank == 0) {
      c10::WarningUtils::set_warning_handler(nullptr);
    }
  });
  EXPECT_TRUE(contains(warnings.text, "not sharded"));
  EXPECT_TRUE(contains(warnings.text, "late"));
  EXPECT_FALSE(contains(warnings.text, "a.bias"));
}

} // namespace
} // namespace fsdp
