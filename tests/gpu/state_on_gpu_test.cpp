// What was trained on a GPU goes to disk and comes back: on other numbers of
// ranks, on the host, and into the middle of training.
#include <fsdp/checkpoint.h>
#include <fsdp/clip_grad_norm.h>
#include <fsdp/optim.h>
#include <fsdp/state_dict.h>

#include "support/gpu.h"
#include "support/processes.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

const ModelArgs kArgs{.n_layers = 2, .dropout_p = 0};

Transformer sharded_on(c10::DeviceType device) {
  auto net = seeded<Transformer>(kArgs);
  shard_transformer(net, {.mesh = init_device_mesh(device, {get_world_size()})});
  return net;
}

/// The same batch on every rank, so that their number does not matter.
torch::Tensor step(Transformer& net, torch::optim::Optimizer& optimizer, int number) {
  const auto tokens = torch::randint(8, {2, 16}, generator(number), torch::kLong);
  auto loss = net(tokens).pow(2).mean();
  loss.backward();
  clip_grad_norm_(unique_parameters(*net), 1.0);
  optimizer.step();
  optimizer.zero_grad();
  return loss.detach().cpu();
}

TEST(StateOnGpu, TrainingGoesOnFromACheckpointOnAnyNumberOfRanks) {
  SKIP_WITHOUT_GPU();
  const auto path = temporary_folder() + "/model";
  torch::Tensor expected;
  run_ranks(4, [&](int rank) {
    auto net = sharded_on(torch::kCUDA);
    optim::AdamW optimizer(unique_parameters(*net), 1e-2);
    for (int i = 0; i < 3; ++i) {
      step(net, optimizer, i);
    }
    save(get_model_state_dict(net), path);
    save(get_optimizer_state_dict(net, optimizer), path + "_optimizer");
    const auto loss = step(net, optimizer, 3);
    const auto next = step(net, optimizer, 4);
    if (rank == 0) {
      expected = torch::stack({loss, next});
    }
  });
  for (const int n : {1, 2, 8}) {
    for (const auto device : {torch::kCUDA, torch::kCPU}) {
      run_ranks(n, [&](int) {
        auto net = sharded_on(device);
        optim::AdamW optimizer(unique_parameters(*net), 1e-2);
        auto model = get_model_state_dict(net);
        load(model, path);
        set_model_state_dict(net, model);
        auto state = get_optimizer_state_dict(net, optimizer);
        load(state, path + "_optimizer");
        set_optimizer_state_dict(net, optimizer, state);
        const auto loss = step(net, optimizer, 3);
        const auto next = step(net, optimizer, 4);
        EXPECT_TRUE(near(torch::stack({loss, next}), expected, 1e-3)) << "on " << device;
      });
    }
  }
}

/// The copies are queued, and waited for together.
TEST(StateOnGpu, AsyncSaveHoldsTheValuesOfTheCall) {
  SKIP_WITHOUT_GPU();
  const auto path = temporary_folder() + "/checkpoint";
  const auto numbers = torch::arange(1 << 20, torch::kFloat).view({1024, 1024});
  const auto parts = [](const torch::Tensor& from) {
    const auto pairs = torch::view_as_complex(from.view({-1, 2}));
    StateDict state;
    state.insert("plain", from);
    state.insert("transposed", from.t());
    state.insert("part", from.narrow(1, 3, 5));
    state.insert("conjugate", pairs.conj());
    state.insert("negative", torch::imag(pairs.conj()));
    state.insert("on_host", torch::ones({300}));
    return state;
  };
  auto live = numbers.cuda();
  for (const int64_t add : {0, 7}) { // the second one finds memory
    SCOPED_TRACE_OF(add);
    live.add_(add);
    auto future = async_save(parts(live), path);
    live.zero_();
    future.get();
    live.copy_(numbers);
    const auto expected = parts(numbers + add);
    StateDict read;
    for (const auto& [key, value] : expected) {
      const auto& tensor = std::get<torch::Tensor>(value);
      read.insert(key, torch::zeros(tensor.sizes(), tensor.options()));
    }
    load(read, path);
    for (const auto& [key, value] : expected) {
      const auto& tensor = std::get<torch::Tensor>(value);
      EXPECT_SAME(
          std::get<torch::Tensor>(read.at(key)), tensor.resolve_conj().resolve_neg().contiguous())
          << key;
    }
  }
}

TEST(StateOnGpu, FullOnesAreOnTheHostWhenAsked) {
  SKIP_WITHOUT_GPU();
  run_ranks(2, [](int rank) {
    auto net = sharded_on(torch::kCUDA);
    const auto full = get_model_state_dict(net, {.full_state_dict = true, .cpu_offload = true});
    auto whole = seeded<Transformer>(kArgs);
    for (const auto& item : whole->named_parameters()) {
      if (rank == 0) {
        const auto& value = std::get<torch::Tensor>(full.at(item.key()));
        EXPECT_TRUE(value.is_cpu());
        EXPECT_SAME(value, item.value().detach());
      }
    }
  });
}

TEST(StateOnGpu, ClipsByTheNormOfTheWhole) {
  SKIP_WITHOUT_GPU();
  for (const int n : {2, 4, 8}) {
    run_ranks(n, [](int) {
      auto net = sharded_on(torch::kCUDA);
      auto reference = seeded<Transformer>(kArgs);
      reference->to(torch::kCUDA);
      for (int i = 0; i < 2; ++i) {
        const auto tokens = random_tokens(i, {2, 16}, 8).cuda();
        net(tokens).sum().backward();
        reference(tokens).sum().backward();
        average_gradients(*reference);
        const auto norm = clip_grad_norm_(unique_parameters(*net), 0.5);
        const auto expected = torch::nn::utils::clip_grad_norm_(unique_parameters(*reference), 0.5);
        EXPECT_NEAR(norm.item<double>(), expected, 1e-3 * expected);
        expect_parity(*net, *reference, 1e-4);
        net->zero_grad();
        reference->zero_grad();
      }
    });
  }
}

} // namespace
} // namespace fsdp
