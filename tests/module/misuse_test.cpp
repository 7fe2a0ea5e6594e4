// Odd things that programs do, and what comes of them: the right numbers, or an
// error, and never a wrong result or a crash.
#include <fsdp/call.h>
#include <fsdp/debug.h>
#include <fsdp/extension.h>
#include <fsdp/tie_weights.h>
#include <torch/csrc/autograd/autograd.h>

#include "support/plain_extension.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

/// A module whose forward is a function of its one Linear and its input.
struct LambdaImpl : torch::nn::Module {
  using Body = std::function<std::vector<torch::Tensor>(Linear&, torch::Tensor)>;
  explicit LambdaImpl(Body body, int64_t dim = 6)
      : body(std::move(body)), lin(register_module("lin", linear(dim, dim))) {}
  std::vector<torch::Tensor> forward(torch::Tensor x) {
    return body(lin, std::move(x));
  }
  Body body;
  Linear lin;
};
FSDP_MODULE(Lambda);

torch::Tensor leaf() {
  return random_batch(0, {2, 6}).set_requires_grad(true);
}

// ------------------------------------------------------------ Edits in place

TEST(Misuse, AnInputEditedInPlaceThrows) {
  for (const int n : {1, 2}) {
    run_ranks(n, [](int) {
      auto net = seeded<Lambda>(
          [](Linear& lin, torch::Tensor x) { return std::vector{lin(torch::relu_(x))}; });
      fully_shard(net);
      EXPECT_TRUE(
          contains(message_of<c10::Error>([&] { net(leaf() * 1); }), "is being modified inplace"));
    });
  }
}

TEST(Misuse, OutputsMayBeEditedInPlace) {
  run_ranks(2, [](int) {
    const auto views = [](Linear& lin, const torch::Tensor& x) {
      const auto h = lin(x);
      return std::vector{h, h.view(-1)};
    };
    const auto one_view = [](Linear& lin, const torch::Tensor& x) {
      return std::vector{lin(x).view({-1}), lin(x)};
    };
    for (const LambdaImpl::Body& body : {LambdaImpl::Body(views), LambdaImpl::Body(one_view)}) {
      for (const size_t edited : {0, 1}) {
        SCOPED_TRACE_OF(edited);
        auto [net, reference] = twins<Lambda>(body);
        fully_shard(net);
        const auto run = [&](Lambda& each) {
          auto outputs = each(leaf());
          outputs[edited].mul_(3);
          (outputs[0].pow(2).sum() + outputs[1].sum()).backward();
        };
        run(net);
        run(reference);
        average_gradients(*reference);
        expect_parity(*net, *reference);
      }
    }
  });
}

TEST(Misuse, AnInputThatComesBackIsNotForEditing) {
  run_ranks(2, [](int) {
    auto net = seeded<Lambda>([](Linear& lin, torch::Tensor x) { return std::vector{lin(x), x}; });
    fully_shard(net);
    auto outputs = net(leaf() * 1);
    EXPECT_THROW(outputs[1].mul_(3), c10::Error);
  });
}

TEST(Misuse, TheNameOfAReturnedParameterIsItsOwn) {
  run_ranks(2, [](int) {
    auto net = seeded<Lambda>(
        [](Linear& lin, const torch::Tensor&) { return std::vector{lin->bias.view({2, 3})}; });
    fully_shard(net);
    EXPECT_TRUE(
        contains(message_of<c10::Error>([&] { net(leaf()); }), "returns its parameter 'lin.bias'"));
  });
}

// ------------------------------------------------------------ Conversions at odd moments

void expect_double(Stack& net, Stack& reference) {
  reference->to(torch::kDouble);
  for (const auto& param : net->parameters()) {
    EXPECT_EQ(param.scalar_type(), torch::kDouble);
  }
  net->zero_grad();
  train_and_compare(
      net, reference,
      [](Stack& each, int step) {
        return each(random_batch(step, {2, 6}).to(torch::kDouble)).sum();
      },
      2);
}

TEST(Misuse, ModuleToWhileParametersAreWhole) {
  for (const int n : {1, 2}) {
    run_ranks(n, [](int) {
      auto [net, reference] = twins<Stack>(6);
      fully_shard(net->mlps[0]);
      auto root = fully_shard(net);
      net(random_batch(0, {2, 6})); // the root keeps its parameters, and no backward comes
      net->to(torch::kDouble);
      root.reshard();
      expect_double(net, reference);

      auto [other, expected] = twins<Stack>(6);
      auto handle = fully_shard(other);
      handle.unshard();
      other->to(torch::kDouble);
      handle.reshard();
      expect_double(other, expected);

      auto third = seeded<Stack>(6);
      expected = seeded<Stack>(6);
      auto gather = fully_shard(third).unshard(/*async_op=*/true);
      third->to(torch::kDouble);
      gather->wait();
      gather->wait(); // does nothing
      FSDPModule::of(third).reshard();
      expect_double(third, expected);
    });
  }
}

TEST(Misuse, ConversionBetweenForwardAndBackwardThrows) {
  run_ranks(4, [](int) {
    for (const ReshardAfterForward& reshard : {ReshardAfterForward(true), ReshardAfterForward(2)}) {
      SCOPED_TRACE_OF(reshard);
      auto net = seeded<Stack>(6);
      fully_shard(net, {.reshard_after_forward = reshard});
      auto loss = net(random_batch(0, {2, 6})).sum();
      net->to(torch::kDouble);
      EXPECT_TRUE(contains(
          message_of<c10::Error>([&] { loss.backward(); }),
          "between its forward and its backward"));
    }
  });
}

TEST(Misuse, DataAssignedBetweenMicrobatches) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(6);
    auto root = fully_shard(net, {.reshard_after_forward = false});
    root.set_is_last_backward(false);
    root.set_reshard_after_backward(false);
    net(random_batch(0, {2, 6})).sum().backward(); // memory is kept
    const auto fresh = torch::randn({24, 6}, generator(3)).to(test_device());
    auto& weight = net->in_proj->weight;
    weight.set_data(part_of(fresh, weight).clone());
    net(random_batch(0, {2, 6}));
    EXPECT_SAME(weight.detach(), fresh);
    root.reshard();
  });
}

TEST(Misuse, DataAssignedUnderAGatherThatIsThenResharded) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(6);
    auto root = fully_shard(net);
    (void)root.unshard(/*async_op=*/true);
    const auto fresh = torch::randn({24, 6}, generator(3)).to(test_device());
    auto& weight = net->in_proj->weight;
    weight.set_data(part_of(fresh, weight).clone());
    root.reshard(); // adopts it; the gather is of the old one
    root.unshard();
    EXPECT_SAME(weight.detach(), fresh);
    root.reshard();
  });
}

TEST(Misuse, WritesThroughADTensorCountAsASteps) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(6);
    fully_shard(net, {.reshard_after_forward = true});
    auto loss = net(random_batch(0, {2, 6})).sum();
    as_dtensor(net->in_proj->weight).to_local().add_(1);
    EXPECT_THROW(loss.backward(), c10::Error);
  });
}

// ------------------------------------------------------------ Orders

TEST(Misuse, EvaluationWithAGroupOfSeveralKeptModules) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Stack>(6);
    fully_shard({net->mlps[0], net->mlps[1]}, {.reshard_after_forward = false});
    fully_shard(net);
    train_and_compare(net, reference, [](Stack& each, int step) {
      auto loss = each(random_batch(step, {2, 6})).sum();
      loss.backward();
      each->zero_grad();
      {
        torch::NoGradGuard no_grad;
        each(random_batch(step, {2, 6}));
        for (const auto& param : each->parameters()) {
          EXPECT_TRUE(
              !detail::FSDPParam::find(param) ||
              param.sizes() == as_dtensor(param).to_local().sizes());
        }
      }
      return each(random_batch(step, {2, 6})).sum();
    });
  });
}

TEST(Misuse, AForwardThatFailsKeepsWhatMicrobatchesAccumulated) {
  run_ranks(2, [](int) {
    bool fail = false;
    const auto body = [&fail](Linear& lin, const torch::Tensor& x) {
      TORCH_CHECK(!fail, "a bad batch");
      return std::vector{lin(x)};
    };
    auto [net, reference] = twins<Lambda>(body);
    auto root = fully_shard(net);
    root.set_requires_gradient_sync(false);
    net(leaf())[0].sum().backward();
    fail = true;
    EXPECT_THROW(net(leaf()), c10::Error);
    fail = false;
    root.set_requires_gradient_sync(true);
    net(leaf())[0].sum().backward();
    for (int i = 0; i < 2; ++i) {
      reference(leaf())[0].sum().backward();
    }
    average_gradients(*reference);
    expect_parity(*net, *reference);
  });
}

TEST(Misuse, ALossOfTheParametersAlone) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<MLP>(6);
    auto root = fully_shard(net);
    const auto loss_of = [](MLP& each) { return each(random_batch(0, {2, 6})).sum(); };
    loss_of(net).backward();
    loss_of(reference).backward();
    average_gradients(*reference);
    root.unshard();
    net->in_proj->weight.pow(2).sum().backward(); // no output hook announces it
    reference->in_proj->weight.pow(2).sum().backward();
    expect_parity(*net, *reference);
    EXPECT_FALSE(root.is_unsharded());
  });
}

TEST(Misuse, ABackwardInsideForward) {
  struct ForcesImpl : torch::nn::Module {
    ForcesImpl()
        : energy(register_module("energy", linear(6, 6))),
          head(register_module("head", linear(6, 6))) {}
    torch::Tensor forward(const torch::Tensor& x) {
      auto positions = x.detach().clone().set_requires_grad(true);
      const auto forces =
          torch::autograd::grad({torch::tanh(energy(positions)).sum()}, {positions})[0];
      return head(forces);
    }
    Linear energy, head;
  };
  struct Forces : Holder<ForcesImpl> {
    Forces() : Holder<ForcesImpl>(std::make_shared<Hooked<ForcesImpl>>()) {}
  };
  run_ranks(2, [](int) {
    for (const bool inner : {false, true}) {
      SCOPED_TRACE_OF(inner);
      auto [net, reference] = twins<Forces>();
      if (inner) {
        fully_shard(net->energy);
      }
      fully_shard(net);
      train_and_compare(net, reference, [](Forces& each, int step) {
        return each(random_batch(step, {2, 6})).sum();
      });
    }
  });
}

// ------------------------------------------------------------ Lifetimes

TEST(Misuse, HandlesThatOutliveTheirModules) {
  run_ranks(2, [](int) {
    auto handle = [] {
      torch::nn::Linear foreign(4, 4);
      return fully_shard(by_call(foreign));
    }();
    EXPECT_THROW(handle.set_requires_gradient_sync(true), c10::Error);
    Linear kept = linear(4, 4);
    auto pair = [&] {
      Linear gone = linear(4, 4);
      return fully_shard({kept, gone});
    }();
    pair.set_requires_gradient_sync(true);
    torch::nn::LinearImpl on_stack(4, 4);
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { fully_shard(by_call(on_stack)); }),
        "that a holder or a shared_ptr owns"));
    EXPECT_EQ(on_stack.weight.size(0), 4);
  });
}

TEST(Misuse, LogsThatEndInAnyOrder) {
  run_ranks(1, [](int) {
    auto net = seeded<MLP>(4);
    fully_shard(net);
    auto first = std::make_unique<EventLog>();
    auto second = std::make_unique<EventLog>();
    auto counts = std::make_unique<CommDebugMode>();
    CommDebugMode inner;
    first.reset();
    counts.reset();
    net(random_batch(0, {2, 4}));
    EXPECT_EQ(second->events().size(), 1u);
    second.reset();
    net(random_batch(0, {2, 4}));
  });
}

TEST(Misuse, AFailedCallChangesNothing) {
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

TEST(Misuse, ATiedWeightOutsideOfItsGroup) {
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

TEST(Misuse, AGroupOfEmptyParameters) {
  struct EmptyImpl : torch::nn::Module {
    EmptyImpl() : nothing(register_parameter("nothing", torch::empty({0, 3}))) {}
    torch::Tensor forward(const torch::Tensor& x) {
      return x * 2 + nothing.sum();
    }
    torch::Tensor nothing;
  };
  run_ranks(2, [](int) {
    Holder<EmptyImpl> net(std::make_shared<Hooked<EmptyImpl>>());
    fully_shard(net);
    net(torch::ones({2})).sum().backward();
    EXPECT_EQ(net->nothing.grad().sizes(), net->nothing.sizes());
  });
}

// ------------------------------------------------------------ Extensions

TEST(Misuse, ExtensionsThatMoveAndGo) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<MLP>(5);
    auto root = fully_shard(net, {.reshard_after_forward = true});
    const auto loss_of = [](MLP& each, int step) { return each(random_batch(step, {2, 5})).sum(); };
    set_all_gather_extension(net->in_proj->weight, std::make_shared<PlainExtension>());
    train_and_compare(net, reference, loss_of, 2);
    set_all_gather_extension(net->in_proj->weight, nullptr);
    set_all_gather_extension(net->out_proj->weight, std::make_shared<PlainExtension>());
    train_and_compare(net, reference, loss_of, 2);
    auto gather = root.unshard(/*async_op=*/true);
    set_all_gather_extension(net->out_proj->weight, nullptr);
    gather->wait();
    root.reshard();
    train_and_compare(net, reference, loss_of, 2);
  });
}

TEST(Misuse, AnExtensionBesideNarrowerParameters) {
  struct OddImpl : torch::nn::Module {
    OddImpl()
        : odd(register_parameter("odd", torch::ones({3}, torch::kBFloat16))),
          wide(register_parameter("wide", torch::randn({4, 3}))) {}
    torch::Tensor forward(const torch::Tensor& x) {
      return x.matmul(wide.t()).sum() + odd.to(torch::kFloat).sum();
    }
    torch::Tensor odd, wide;
  };
  run_ranks(1, [](int) {
    Holder<OddImpl> net(std::make_shared<Hooked<OddImpl>>());
    fully_shard(net);
    set_all_gather_extension(net->wide, std::make_shared<PlainExtension>());
    net(torch::ones({2, 3})).backward();
    EXPECT_SAME(net->wide.grad(), torch::full({4, 3}, 2.0));
  });
}

TEST(Misuse, CustomBuffersAreUsedForNeighboursToo) {
  struct Counting : AllGather {
    torch::Tensor allocate(at::IntArrayRef sizes, at::TensorOptions options) override {
      ++allocations;
      return AllGather::allocate(sizes, options);
    }
    Work operator()(
        torch::Tensor& out, const torch::Tensor& in, ProcessGroup& group, bool) override {
      return group.all_gather_async(out, in);
    }
    int allocations = 0;
  };
  run_ranks(4, [](int) {
    auto net = seeded<MLP>(6);
    auto comm = std::make_shared<Counting>();
    fully_shard(net, {.reshard_after_forward = 2}).set_custom_all_gather(comm);
    EventLog log;
    net(random_batch(0, {2, 6})).sum().backward();
    EXPECT_EQ(comm->allocations, 2);
    log.clear();
    torch::NoGradGuard no_grad;
    net(random_batch(0, {2, 6}));
    EXPECT_EQ(log.lines(), (std::vector<std::string>{"unshard  FORWARD", "reshard  FORWARD"}));
  });
}

TEST(Misuse, HalfAModelOnMetaIsRefusedBeforeAnythingChanges) {
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

TEST(Misuse, GradientsFromBeforeShardingAreGone) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Stack>(4);
    net(random_batch(7, {2, 4})).sum().backward();
    fully_shard(net);
    for (const auto& param : net->parameters()) {
      EXPECT_FALSE(param.grad().defined());
    }
    train_and_compare(net, reference, [](Stack& each, int step) {
      return each(random_batch(step, {2, 4})).sum();
    });
  });
}

} // namespace
} // namespace fsdp
