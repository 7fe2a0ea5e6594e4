// Stages of a pipeline, each sharded over its ranks: many forwards and backwards
// in one iteration, reductions only in the last.
#include <fsdp/activation_checkpointing.h>
#include <fsdp/debug.h>

#include "parallel/tp_models.h"

namespace fsdp {
namespace {

using namespace test;

constexpr int64_t kDim = 5;
constexpr int kMicrobatches = 4;

/// Gives stage 1 what stage 0 has, or the other way round.
torch::Tensor pass(const torch::Tensor& tensor, const DeviceMesh& pp, int64_t from) {
  auto sent = tensor.contiguous();
  pp.get_group().broadcast(sent, static_cast<int>(from));
  return sent;
}

torch::Tensor loss_of(const torch::Tensor& output) {
  return output.pow(2).mean() / kMicrobatches;
}

void set_last(FSDPModule stage, bool is_last) {
  stage.set_is_last_backward(is_last);
  stage.set_requires_gradient_sync(is_last);
  stage.set_reshard_after_backward(is_last);
}

/// Two stages of an MLP stack, over (pp, dp) and perhaps tp.
struct Pipeline {
  Pipeline(const DeviceMesh& grid, bool checkpointed)
      : pp(grid["pp"]), dp(grid["dp"]), stage(in_double<Stack>(kDim, 4)) {
    const auto first = 2 * pp.get_local_rank();
    mlps = {stage->mlps[first], stage->mlps[first + 1]};
    for (auto& mlp : mlps) {
      if (grid.ndim() == 3) {
        parallelize_module(mlp, grid["tp"], mlp_plan());
      }
      if (checkpointed) {
        apply_activation_checkpointing(mlp);
      }
      fully_shard(mlp, {.mesh = dp, .reshard_after_forward = false});
    }
    share_comm_ctx({FSDPModule::of(mlps[0]), FSDPModule::of(mlps[1])}); // no common root
  }

  torch::Tensor forward(torch::Tensor x) {
    for (auto& mlp : mlps) {
      x = mlp(x);
    }
    return x;
  }

  DeviceMesh pp, dp;
  Stack stage; // all of it; this rank trains two
  std::vector<MLP> mlps;
};

/// All forwards, then all backwards: GPipe.
void run_step(Pipeline& pipeline, int step, torch::Tensor& loss) {
  const bool is_first = pipeline.pp.get_local_rank() == 0;
  std::vector<torch::Tensor> inputs, outputs;
  for (int i = 0; i < kMicrobatches; ++i) {
    auto x = tp_batch(kMicrobatches * step + i, {3, kDim}, pipeline.dp.get_local_rank());
    if (is_first) {
      outputs.push_back(pipeline.forward(x));
      pass(outputs.back().detach(), pipeline.pp, 0);
    } else {
      inputs.push_back(pass(torch::empty_like(x), pipeline.pp, 0).set_requires_grad(true));
      outputs.push_back(loss_of(pipeline.forward(inputs.back())));
      loss += outputs.back().detach();
    }
  }
  for (int i = 0; i < kMicrobatches; ++i) {
    for (auto& mlp : pipeline.mlps) {
      set_last(FSDPModule::of(mlp), i == kMicrobatches - 1);
    }
    if (is_first) {
      outputs[i].backward(pass(torch::empty_like(outputs[i]), pipeline.pp, 1));
    } else {
      outputs[i].backward();
      pass(inputs[i].grad(), pipeline.pp, 1);
    }
  }
}

void train(const DeviceMesh& grid, bool checkpointed) {
  SCOPED_TRACE_OF(checkpointed);
  Pipeline pipeline(grid, checkpointed);
  auto reference = in_double<Stack>(kDim, 4);
  std::vector<torch::Tensor> params;
  for (auto& mlp : pipeline.mlps) {
    const auto own = mlp->parameters();
    params.insert(params.end(), own.begin(), own.end());
  }
  torch::optim::AdamW optimizer(params, 1e-2);
  torch::optim::AdamW expected_optimizer(reference->parameters(), 1e-2);
  for (int step = 0; step < 4; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    auto loss = torch::zeros({}, torch::device(test_device()).dtype(torch::kDouble));
    const CommDebugMode comm;
    run_step(pipeline, step, loss);
    EXPECT_EQ(comm.count("reduce_scatter"), 2); // of the last microbatch only
    EXPECT_EQ(comm.count("all_gather"), 2);     // kept in between
    auto expected = torch::zeros({}, torch::device(test_device()).dtype(torch::kDouble));
    for (int i = 0; i < kMicrobatches; ++i) {
      auto each = loss_of(
          reference(tp_batch(kMicrobatches * step + i, {3, kDim}, pipeline.dp.get_local_rank())));
      expected += each.detach();
      each.backward();
    }
    if (pipeline.pp.get_local_rank() == 1) {
      EXPECT_TRUE(near(loss, expected, 1e-5));
    }
    average_gradients(*reference);
    const auto first = 2 * pipeline.pp.get_local_rank();
    for (int64_t i = 0; i < 2; ++i) {
      expect_parity(*pipeline.mlps[i], *reference->mlps[first + i]);
    }
    optimizer.step();
    expected_optimizer.step();
    optimizer.zero_grad();
    expected_optimizer.zero_grad();
    for (int64_t i = 0; i < 2; ++i) {
      expect_parity(*pipeline.mlps[i], *reference->mlps[first + i]);
    }
  }
}

TEST(Pipeline, TwoStagesOfShardedModules) {
  run_ranks(4, [](int) {
    for (const bool checkpointed : {false, true}) {
      train(init_device_mesh(test_device(), {2, 2}, {"pp", "dp"}), checkpointed);
    }
  });
}

TEST(Pipeline, WithTensorParallelism) {
  run_ranks(8, [](int) {
    for (const bool checkpointed : {false, true}) {
      train(init_device_mesh(test_device(), {2, 2, 2}, {"pp", "dp", "tp"}), checkpointed);
    }
  });
}

} // namespace
} // namespace fsdp
