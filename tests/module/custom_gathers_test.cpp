// Gathers with extensions, and with buffers of the user.
#include <fsdp/debug.h>
#include <fsdp/extension.h>

#include "support/plain_extension.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

// ------------------------------------------------------------ Extensions

/// Sends bf16 instead of float, or two halves of it.
struct Bf16Gather : AllGatherExtension {
  AllGatherPayload pre_all_gather(const torch::Tensor& shard, const AllGatherInfo& info) override {
    EXPECT_EQ(info.sizes.size(), static_cast<size_t>(shard.dim()));
    EXPECT_EQ(shard.size(0), (info.sizes[0] + info.mesh.size() - 1) / info.mesh.size()); // padded
    ++calls;
    const auto high = shard.to(torch::kBFloat16);
    return {{high, (shard - high.to(torch::kFloat)).to(torch::kHalf)}, info.name};
  }
  void post_all_gather(
      const std::vector<torch::Tensor>& outputs,
      const std::any& metadata,
      const AllGatherInfo& info,
      torch::Tensor& out) override {
    EXPECT_EQ(std::any_cast<std::string>(metadata), info.name);
    EXPECT_EQ(outputs.size(), 2u);
    const auto rows = outputs[0].narrow(0, 0, info.sizes[0]).to(torch::kFloat) +
                      outputs[1].narrow(0, 0, info.sizes[0]).to(torch::kFloat);
    out.copy_(rows);
  }
  int calls = 0;
};

TEST(Extensions, TrainOnWhatWasSent) {
  for (const int n : {1, 2, 8}) {
    run_ranks(n, [](int) {
      for (const bool reshard : {true, false}) {
        SCOPED_TRACE_OF(reshard);
        // Weights (12, 3) and (3, 12): uneven, and empty on 8.
        auto [net, reference] = twins<Stack>(3);
        for (auto& mlp : net->mlps) {
          fully_shard(mlp, {.reshard_after_forward = reshard});
        }
        fully_shard(net, {.reshard_after_forward = reshard});
        auto extension = std::make_shared<Bf16Gather>();
        for (auto& mlp : net->mlps) {
          set_all_gather_extension(mlp->in_proj->weight, extension);
          set_all_gather_extension(mlp->out_proj->weight, extension);
        }
        // The two halves make 19 bits of the 24.
        torch::optim::SGD sharded_optimizer(net->parameters(), 1e-2);
        torch::optim::SGD optimizer(reference->parameters(), 1e-2);
        for (int step = 0; step < 3; ++step) {
          auto loss = net(random_batch(step, {2, 3})).sum();
          auto expected = reference(random_batch(step, {2, 3})).sum();
          loss.backward();
          expected.backward();
          average_gradients(*reference);
          expect_parity(*net, *reference, 2e-3);
          sharded_optimizer.step();
          optimizer.step();
          sharded_optimizer.zero_grad();
          optimizer.zero_grad();
        }
        EXPECT_EQ(extension->calls, reshard ? 3 * 2 * 6 : 3 * 6);
        // Taken away again, it is exact.
        for (auto& mlp : net->mlps) {
          set_all_gather_extension(mlp->in_proj->weight, nullptr);
          set_all_gather_extension(mlp->out_proj->weight, nullptr);
        }
        net->mlps[0](random_batch(0, {2, 3}));
        EXPECT_EQ(extension->calls, reshard ? 3 * 2 * 6 : 3 * 6);
      }
    });
  }
}

TEST(Extensions, SendFewerBytes) {
  struct Half : AllGatherExtension {
    AllGatherPayload pre_all_gather(const torch::Tensor& shard, const AllGatherInfo&) override {
      return {{shard.to(torch::kHalf)}};
    }
    void post_all_gather(
        const std::vector<torch::Tensor>& outputs,
        const std::any&,
        const AllGatherInfo&,
        torch::Tensor& out) override {
      out.copy_(outputs[0]);
    }
  };
  run_ranks(2, [](int) {
    auto net = seeded<Linear>(torch::nn::LinearOptions(8, 8).bias(false));
    fully_shard(net, {.reshard_after_forward = true});
    CommDebugMode comm;
    net(random_batch(0, {2, 8})).sum().backward();
    EXPECT_EQ(comm.bytes("all_gather"), 2 * 4 * 64);
    set_all_gather_extension(net->weight, std::make_shared<Half>());
    comm.clear();
    net(random_batch(0, {2, 8})).sum().backward();
    EXPECT_EQ(comm.bytes("all_gather"), 2 * 2 * 64);
  });
}

TEST(CustomGathers, RefuseBlocks) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(4);
    fully_shard(net, {.shard_placement_fn = [](const auto&, const torch::Tensor& param) {
                  return ShardPlacement{.merged_dims = param.dim()};
                }});
    set_all_gather_extension(net->in_proj->weight, std::make_shared<PlainExtension>());
    EXPECT_TRUE(contains(
        message_of<c10::NotImplementedError>([&] { net(random_batch(0, {2, 4})); }),
        "'in_proj.weight' has an all-gather extension and cannot be a BlockShard"));
  });
}

TEST(CustomGathers, ExtensionsThatMoveAndGo) {
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

TEST(CustomGathers, AnExtensionBesideNarrowerParameters) {
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

// ------------------------------------------------------------ Buffers

TEST(CustomGathers, CustomBuffersAreUsedForNeighboursToo) {
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

TEST(Comms, OneBufferIsAskedForPerGatherWhateverIsCast) {
  struct OneBuffer : AllGather {
    torch::Tensor allocate(at::IntArrayRef sizes, at::TensorOptions options) override {
      ++calls;
      return AllGather::allocate(sizes, options);
    }
    Work operator()(
        torch::Tensor& out, const torch::Tensor& in, ProcessGroup& group, bool) override {
      return group.all_gather_async(out, in);
    }
    int calls = 0;
  };
  run_ranks(2, [](int) {
    for (const std::optional<torch::Dtype> dtype :
         {std::optional<torch::Dtype>(), std::optional(torch::kBFloat16)}) {
      SCOPED_TRACE_OF(dtype);
      auto net = seeded<MLP>(4);
      auto root = fully_shard(net, {.mp_policy = {.param_dtype = dtype}});
      const auto comm = std::make_shared<OneBuffer>();
      root.set_custom_all_gather(comm);
      root.unshard();
      EXPECT_EQ(comm->calls, 1);
    }
  });
}

} // namespace
} // namespace fsdp
