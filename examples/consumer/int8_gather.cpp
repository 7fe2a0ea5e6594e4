// Trains twice, with exact weights and with weights that are gathered as int8: the
// losses are close, and int8 moves less than a third of the bytes.
#include "int8_gather.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fsdp/fsdp.h>

#include <cmath>
#include <iostream>
#include <mutex>

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t dim)
      : up(register_module("up", torch::nn::Linear(dim, 4 * dim))),
        down(register_module("down", torch::nn::Linear(4 * dim, 1))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return down(torch::gelu(up(x)));
  }
  torch::nn::Linear up, down;
};
FSDP_MODULE(Net);

constexpr int kRanks = 4;
constexpr int64_t kDim = 30;

Net make_net() {
  static std::mutex mutex; // the default generator is shared by the threads
  std::lock_guard lock(mutex);
  torch::manual_seed(7);
  return Net(kDim);
}

struct Result {
  double loss = 0;
  int64_t bytes = 0; // gathered
};

Result train(int rank, bool int8) {
  auto net = make_net();
  fsdp::fully_shard(net);
  for (const auto& param : net->parameters()) {
    if (int8 && param.dim() == 2) { // biases are small, so they are sent as they are
      fsdp::set_all_gather_extension(param, std::make_shared<Int8Gather>());
    }
  }
  fsdp::optim::AdamW optimizer(net->parameters(), 3e-3);
  const fsdp::CommDebugMode comms;
  torch::Tensor loss;
  for (int step = 0; step < 30; ++step) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(kRanks * step + rank);
    const auto x = torch::randn({16, kDim}, generator);
    loss = (net(x) - x.sin().sum(1, /*keepdim=*/true)).pow(2).mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  loss = loss.detach();
  fsdp::default_group().all_reduce(loss, fsdp::ReduceOp::Avg);
  return {loss.item<double>(), comms.bytes("all_gather")};
}

int main() {
  fsdp::run_ranks(kRanks, [](int rank) {
    const auto exact = train(rank, /*int8=*/false);
    const auto int8 = train(rank, /*int8=*/true);
    TORCH_CHECK(std::abs(int8.loss / exact.loss - 1) < 0.05, int8.loss, " is not ", exact.loss);
    TORCH_CHECK(int8.bytes * 3 < exact.bytes, int8.bytes, " of ", exact.bytes);
    if (rank == 0) {
      std::cout << "exact: loss " << exact.loss << ", " << exact.bytes << " bytes gathered\n"
                << "int8:  loss " << int8.loss << ", " << int8.bytes << " bytes gathered\n";
    }
  });
}
