// Trains a model that is sharded over four ranks, and next to it the same model
// without sharding: the losses are equal.
#include <ATen/CPUGeneratorImpl.h>
#include <fsdp/fsdp.h>

#include <iostream>
#include <mutex>

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t dim)
      : up(register_module("up", torch::nn::Linear(dim, 4 * dim))),
        down(register_module("down", torch::nn::Linear(4 * dim, dim))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return x + down(torch::gelu(up(x)));
  }
  torch::nn::Linear up, down;
};
FSDP_MODULE(Block); // instead of TORCH_MODULE(Block)

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t dim) : head(register_module("head", torch::nn::Linear(dim, 3))) {
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block(dim)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : blocks) {
      x = block(x);
    }
    return head(x);
  }
  std::vector<Block> blocks;
  torch::nn::Linear head;
};
FSDP_MODULE(Net);

constexpr int kRanks = 4;
constexpr int64_t kDim = 10; // not a multiple of the number of ranks

Net make_net() {
  static std::mutex mutex; // the default generator is shared by the threads
  std::lock_guard lock(mutex);
  torch::manual_seed(7);
  return Net(kDim);
}

torch::Tensor batch(int step) { // the rows of all ranks
  return torch::randn({4 * kRanks, kDim}, at::make_generator<at::CPUGeneratorImpl>(step));
}

int main() {
  fsdp::run_ranks(kRanks, [](int rank) {
    auto net = make_net();
    auto whole = make_net();
    for (auto& block : net->blocks) {
      fsdp::fully_shard(block); // a group per block
    }
    fsdp::fully_shard(net); // and a group for the other parameters
    fsdp::optim::AdamW optimizer(net->parameters(), 1e-2);
    torch::optim::AdamW reference(whole->parameters(), 1e-2);
    for (int step = 0; step < 5; ++step) {
      auto loss = net(batch(step).narrow(0, 4 * rank, 4)).pow(2).mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();

      auto expected = whole(batch(step)).pow(2).mean();
      expected.backward();
      reference.step();
      reference.zero_grad();

      auto mean = loss.detach().clone();
      fsdp::default_group().all_reduce(mean, fsdp::ReduceOp::Avg);
      TORCH_CHECK(torch::allclose(mean, expected, 1e-5), mean.item(), " is not ", expected.item());
      if (rank == 0) {
        std::cout << "step " << step << ": loss " << mean.item<float>() << "\n";
      }
    }
  });
}
