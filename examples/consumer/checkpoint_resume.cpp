// Trains on four ranks and saves a checkpoint half-way. Then resumes from the
// checkpoint on two ranks: the weights end up the same, up to rounding.
#include <fsdp/fsdp.h>
#include <stdlib.h>

#include <iostream>
#include <optional>

using Net = fsdp::nn::Sequential;

struct Training {
  Training() : net(fsdp::nn::Linear(8, 32), fsdp::nn::Tanh(), fsdp::nn::Linear(32, 1)) {
    fsdp::fully_shard(net);
    fsdp::init_parameters(
        net, [](const std::string&, torch::Tensor& param) { param.normal_(0, 0.2); });
    optimizer.emplace(net->parameters(), 1e-2);
  }
  void run_until(int64_t last) {
    const auto batch = torch::linspace(-1, 1, 8 * 8).view({8, 8});
    const auto rows = 8 / fsdp::get_world_size();
    for (; step < last; ++step) {
      const auto mine = batch.roll(step, 0).narrow(0, rows * fsdp::get_rank(), rows);
      (net->forward(mine) - mine.sum(1, true)).pow(2).mean().backward();
      optimizer->step();
      optimizer->zero_grad();
    }
  }
  fsdp::StateDict state() {
    fsdp::StateDict state;
    state.insert_all(fsdp::get_model_state_dict(net), "model.");
    state.insert_all(fsdp::get_optimizer_state_dict(net, *optimizer), "optim.");
    state.insert("step", step);
    return state;
  }

  Net net;
  std::optional<fsdp::optim::AdamW> optimizer;
  int64_t step = 0;
};

int main() {
  char folder[] = "/tmp/fsdp-example-XXXXXX";
  TORCH_CHECK(mkdtemp(folder));
  const auto checkpoints = std::string(folder) + "/checkpoints";
  torch::Tensor uninterrupted;
  fsdp::run_ranks(4, [&](int rank) {
    Training training;
    training.run_until(5);
    fsdp::CheckpointSeries(checkpoints).save(training.step, training.state());
    training.run_until(10);
    const auto weight = fsdp::as_dtensor(training.net->parameters()[0]).full_tensor();
    if (rank == 0) {
      uninterrupted = weight.clone();
    }
  });
  fsdp::run_ranks(2, [&](int rank) {
    Training training;
    auto state = training.state();
    fsdp::load(state, fsdp::CheckpointSeries(checkpoints).latest().value());
    fsdp::set_optimizer_state_dict(training.net, *training.optimizer, state.below("optim."));
    training.step = std::get<int64_t>(state.at("step"));
    TORCH_CHECK(training.step == 5);
    training.run_until(10);
    const auto weight = fsdp::as_dtensor(training.net->parameters()[0]).full_tensor();
    TORCH_CHECK(torch::allclose(weight, uninterrupted, 1e-4, 1e-6));
    if (rank == 0) {
      std::cout << "ten steps on four ranks, and five and five on four and two, are the same\n";
    }
  });
  TORCH_CHECK(system(("rm -r " + std::string(folder)).c_str()) == 0);
}
