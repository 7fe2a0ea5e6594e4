#include <fsdp/fsdp.h>

#include <iostream>

namespace nn = fsdp::nn; // LibTorch's modules, ready to be sharded

int main() {
  fsdp::run_ranks(4, [](int rank) { // as threads of this process
    nn::Sequential net(nn::Linear(8, 64), nn::Tanh(), nn::Linear(64, 1));
    for (const auto& layer : *net) {
      fsdp::fully_shard(layer.ptr()); // a group per layer
    }
    fsdp::fully_shard(net); // and the root
    fsdp::init_parameters(net, [](const std::string&, torch::Tensor& p) { p.normal_(0, 0.2); });

    fsdp::optim::AdamW optimizer(net->parameters(), 1e-2);
    const auto x = torch::linspace(-1, 1, 32).view({4, 8}) + 0.1 * rank; // this rank's batch
    torch::Tensor loss;
    for (int step = 0; step < 50; ++step) {
      loss = (net(x) - x.sin().sum(1, /*keepdim=*/true)).pow(2).mean();
      loss.backward(); // p.grad() is this rank's shard of the mean over all ranks
      optimizer.step();
      optimizer.zero_grad();
    }
    TORCH_CHECK(loss.item<float>() < 1, "rank ", rank, " has not learned");
    if (rank == 0) {
      std::cout << fsdp::as_dtensor(net->parameters()[0]).str() << "\n";
    }
  });
}
