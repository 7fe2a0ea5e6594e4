// How gradients are divided, and custom communication.
#include <fsdp/call.h>
#include <fsdp/debug.h>
#include <fsdp/tie_weights.h>

#include "state/fsdp_state.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

// ------------------------------------------------------------ Gradient division

TEST(GradientDivision, DivideFactorsAreOfOneModuleAlone) {
  run_ranks(4, [](int) {
    for (const double factor : {8.0, 4.0}) {
      SCOPED_TRACE_OF(factor);
      auto [net, reference] = twins<Transformer>(ModelArgs{.dropout_p = 0, .weight_tying = false});
      shard_transformer(net, {.reshard_after_forward = false});
      FSDPModule::of(net).set_gradient_divide_factor(factor);
      torch::optim::AdamW sharded_optimizer(net->parameters(), 1e-2);
      torch::optim::AdamW optimizer(reference->parameters(), 1e-2);
      for (int step = 0; step < 5; ++step) {
        auto loss = transformer_loss(net, step);
        auto expected = transformer_loss(reference, step);
        EXPECT_TRUE(near(loss.detach(), expected.detach(), 1e-5));
        loss.backward();
        expected.backward();
        for (const auto& item : reference->named_parameters()) {
          const bool in_block = item.key().find("layers.") == 0;
          default_group().all_reduce(item.value().grad());
          item.value().mutable_grad().div_(in_block ? 4.0 : factor);
        }
        expect_parity(*net, *reference);
        sharded_optimizer.step();
        optimizer.step();
        sharded_optimizer.zero_grad();
        optimizer.zero_grad();
      }
    }
  });
}

// 257 is not a number of bf16. The sum of 256 ones and zeros in bf16 would end at 256.
TEST(WideSum, IsExactWhereBf16IsNot) {
  for (const int n : {1, 2, 3, 4}) {
    run_ranks(n, [n](int rank) {
      auto group = default_group();
      for (const bool async_op : {false, true}) {
        for (const auto op :
             {ReduceOp(ReduceOp::Sum), ReduceOp(ReduceOp::Avg), ReduceOp::premul_sum(0.5)}) {
          SCOPED_TRACE_OF(n, async_op, op.str());
          const auto in = torch::full({5 * n}, rank == 0 ? 256.0 : 1.0, test_device());
          auto out = torch::empty({5}, in.options());
          WideSumReduceScatter()(out, in, group, op, async_op).wait();
          const auto sum = 255.0 + n;
          const auto expected = op.kind() == ReduceOp::Avg         ? sum / n
                                : op.kind() == ReduceOp::PremulSum ? sum / 2
                                                                   : sum;
          EXPECT_SAME(out, torch::full_like(out, expected));
        }
      }
      auto out = torch::empty({1}, test_device());
      const auto message = message_of<c10::ValueError>([&] {
        WideSumReduceScatter()(out, torch::ones({n}, test_device()), group, ReduceOp::Max, false);
      });
      EXPECT_TRUE(contains(message, "it can only add and average, not reduce by max"));
    });
  }
}

// A model that computes in bf16 has gradients in bf16, so nothing is lost on the way.
TEST(WideSum, GradientsAreThoseOfTheUsualReduction) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{3}, {2, 2}}) {
    for (const bool in_bf16 : {false, true}) {
      const int n = shape.size() == 2 ? 4 : 3;
      run_ranks(n, [&](int) {
        SCOPED_TRACE_OF(n, in_bf16);
        auto [net, usual] = twins<Stack>(6);
        const auto names = shape.size() == 2 ? std::vector<std::string>{"replicate", "shard"}
                                             : std::vector<std::string>{"shard"};
        FullyShardOptions options{.mesh = init_device_mesh(test_device(), shape, names)};
        if (in_bf16) {
          options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
        }
        for (size_t i = 0; i < net->mlps.size(); ++i) {
          fully_shard(net->mlps[i], options)
              .set_custom_reduce_scatter(std::make_shared<WideSumReduceScatter>());
          fully_shard(usual->mlps[i], options);
        }
        fully_shard(net, options);
        fully_shard(usual, options);
        for (int step = 0; step < 2; ++step) {
          usual(random_batch(step, {4, 6})).sum().backward();
          const CommDebugMode comm;
          net(random_batch(step, {4, 6})).sum().backward();
          EXPECT_EQ(comm.count("all_to_all"), 3);
          EXPECT_EQ(comm.count("reduce_scatter"), 0);
        }
        for (const auto& item : usual->named_parameters()) {
          const auto mine = net->named_parameters()[item.key()].grad();
          EXPECT_TRUE(near(mine, item.value().grad(), in_bf16 ? 1e-5 : 0.02)) << item.key();
        }
      });
    }
  }
}

struct RecordingReduceScatter : ReduceScatter {
  Work operator()(
      torch::Tensor& out,
      const torch::Tensor& in,
      ProcessGroup& group,
      ReduceOp op,
      bool) override {
    ops.push_back(op);
    return group.reduce_scatter_async(out, in, op);
  }
  torch::Tensor allocate(at::IntArrayRef sizes, at::TensorOptions options) override {
    ++allocations;
    return ReduceScatter::allocate(sizes, options);
  }
  std::vector<ReduceOp> ops;
  int allocations = 0;
};

TEST(GradientDivision, ForcedSumsGoOverTheWireAsSums) {
  run_ranks(2, [](int) {
    for (const bool force_sum : {false, true}) {
      SCOPED_TRACE_OF(force_sum);
      auto [net, reference] = twins<MLP>(6);
      auto root = fully_shard(net);
      auto comm = std::make_shared<RecordingReduceScatter>();
      root.set_custom_reduce_scatter(comm);
      root.set_force_sum_reduction_for_comms(force_sum);
      train_and_compare(
          net, reference,
          [](MLP& each, int step) { return each(random_batch(step, {2, 6})).sum(); }, 2);
      ASSERT_EQ(comm->ops.size(), 2u);
      EXPECT_EQ(comm->ops[0].kind(), force_sum ? ReduceOp::Sum : ReduceOp::Avg);
      EXPECT_EQ(comm->allocations, 4);
    }
  });
}

TEST(GradientDivision, OneRankDividesOnceAndOnlyIfItMust) {
  run_ranks(1, [](int) {
    for (const std::optional<double> factor : {std::optional<double>(), {1.0}, {2.0}}) {
      for (const bool force_sum : {false, true}) {
        SCOPED_TRACE_OF(factor, force_sum);
        auto net = seeded<Linear>(torch::nn::LinearOptions(8, 4).bias(false));
        auto handle = fully_shard(net);
        if (factor) {
          handle.set_gradient_divide_factor(*factor);
        }
        handle.set_force_sum_reduction_for_comms(force_sum);
        net(torch::ones({3, 8})).sum().backward();
        EXPECT_SAME(net->weight.grad(), torch::full({4, 8}, 3 / factor.value_or(1)));
      }
    }
  });
}

// ------------------------------------------------------------ Custom communication

struct CountingAllGather : AllGather {
  Work operator()(
      torch::Tensor& out, const torch::Tensor& in, ProcessGroup& group, bool async_op) override {
    ++calls;
    if (!async_op) {
      group.all_gather(out, in);
      return {};
    }
    return group.all_gather_async(out, in);
  }
  int calls = 0;
};

TEST(Comms, CustomOnesAreUsed) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Stack>(6);
    auto gather = std::make_shared<CountingAllGather>();
    auto reduce = std::make_shared<RecordingReduceScatter>();
    for (auto& mlp : net->mlps) {
      auto handle = fully_shard(mlp);
      handle.set_custom_all_gather(gather);
      handle.set_custom_reduce_scatter(reduce);
    }
    fully_shard(net);
    train_and_compare(
        net, reference,
        [](Stack& each, int step) { return each(random_batch(step, {2, 6})).sum(); }, 3);
    EXPECT_EQ(gather->calls, 3 * 6);
    EXPECT_EQ(reduce->ops.size(), 9u);
  });
}

/// Makes its results too short.
struct Shortens : AllGather, ReduceScatter {
  torch::Tensor allocate(at::IntArrayRef sizes, at::TensorOptions options) override {
    return torch::zeros({sizes[0] - at_allocation}, options);
  }
  Work operator()(torch::Tensor& out, const torch::Tensor&, ProcessGroup&, bool) override {
    out = out.narrow(0, 0, out.numel() - 1);
    return {};
  }
  Work operator()(
      torch::Tensor& out, const torch::Tensor&, ProcessGroup&, ReduceOp, bool) override {
    out = out.narrow(0, 0, out.numel() - 1);
    return {};
  }
  int64_t at_allocation = 0;
};

TEST(Comms, WhatUsersLeaveOfABufferIsChecked) {
  run_ranks(2, [](int) {
    const auto message = [](auto set) {
      auto net = seeded<MLP>(6);
      auto handle = fully_shard(net);
      set(handle);
      return message_of<c10::ValueError>([&] { net(random_batch(0, {2, 6})).sum().backward(); });
    };
    for (const int64_t at_allocation : {0, 1}) {
      SCOPED_TRACE_OF(at_allocation);
      const auto comm = std::make_shared<Shortens>();
      comm->at_allocation = at_allocation;
      const auto of_gather =
          message([&](FSDPModule& handle) { handle.set_custom_all_gather(comm); });
      EXPECT_TRUE(contains(of_gather, "the all-gather should leave a contiguous 1D tensor of"))
          << of_gather;
      const auto of_reduce =
          message([&](FSDPModule& handle) { handle.set_custom_reduce_scatter(comm); });
      EXPECT_TRUE(contains(of_reduce, "the reduce-scatter")) << of_reduce;
      EXPECT_TRUE(contains(of_reduce, "should leave a contiguous 1D tensor of")) << of_reduce;
    }
    const auto of_hook = message([](FSDPModule& handle) {
      handle.set_all_reduce_hook(
          [](torch::Tensor& flat) { flat = flat.narrow(0, 0, flat.numel() - 1); });
    });
    EXPECT_TRUE(contains(of_hook, "the all-reduce hook of")) << of_hook;
    default_group().barrier();
  });
}

TEST(Comms, MemoryOfTheProcessGroupOrACustomCommNotBoth) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<MLP>(6);
    auto handle = fully_shard(net);
    handle.set_allocate_memory_from_process_group_for_comm(true);
    train_and_compare(
        net, reference, [](MLP& each, int step) { return each(random_batch(step, {2, 6})).sum(); },
        2);
    handle.set_custom_all_gather(std::make_shared<CountingAllGather>());
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>(
            [&] { handle.set_allocate_memory_from_process_group_for_comm(true); }),
        "cannot call set_allocate_memory_from_process_group"));
    auto third = seeded<MLP>(6);
    auto reducing = fully_shard(third);
    reducing.set_custom_reduce_scatter(std::make_shared<RecordingReduceScatter>());
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>(
            [&] { reducing.set_allocate_memory_from_process_group_for_comm(true); }),
        "the reduce-scatter of group"));
    EXPECT_TRUE(contains(
        message_of<c10::NotImplementedError>([&] { reducing.set_symm_mem_for_comm(); }),
        "symmetric memory (NCCL)"));
  });
}

TEST(Comms, ASeparateGroupForReductionsAndMoreBuffers) {
  run_ranks(4, [](int) {
    for (const int buffers : {1, 2, 3}) {
      SCOPED_TRACE_OF(buffers);
      auto [net, reference] = twins<Transformer>(ModelArgs{.n_layers = 4, .dropout_p = 0});
      shard_transformer(net);
      auto root = FSDPModule::of(net);
      root.set_separate_reduce_scatter_group();
      root.set_reduce_scatter_max_input_buffers(4); // what is set later, before a forward, counts
      root.set_reduce_scatter_max_input_buffers(1);
      FSDPModule::of(net->blocks[0]).set_reduce_scatter_max_input_buffers(buffers, false);
      CommDebugMode comm;
      train_and_compare(net, reference, transformer_loss, 3);
      const auto group = [](TransformerBlock& block) {
        return block.get()->fsdp_state->groups().front();
      };
      EXPECT_EQ(
          net.get()->fsdp_state->comm().reductions.max_input_buffers, static_cast<size_t>(buffers));
      EXPECT_EQ(group(net->blocks[0])->max_input_buffers, static_cast<size_t>(buffers));
      EXPECT_EQ(group(net->blocks[1])->max_input_buffers, 1u);
      std::string gathers, reductions;
      for (const auto& call : comm.calls()) {
        if (call.op == "all_gather") {
          gathers = call.group;
        } else if (call.op == "reduce_scatter") {
          reductions = call.group;
        }
      }
      EXPECT_NE(gathers, reductions);
      root.set_separate_reduce_scatter_group(false);
      root.set_reduce_scatter_max_input_buffers(4);
      train_and_compare(net, reference, transformer_loss, 1);
      EXPECT_EQ(net.get()->fsdp_state->comm().reductions.max_input_buffers, 4u);
    }
  });
}

} // namespace
} // namespace fsdp
