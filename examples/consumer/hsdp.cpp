// HSDP: two replicas of a model, each sharded over two ranks. Gradients are reduced
// among the shards, then between the replicas.
#include <fsdp/fsdp.h>

#include <iostream>

int main() {
  fsdp::run_ranks(4, [](int rank) {
    const auto mesh = fsdp::init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    fsdp::nn::Sequential net(fsdp::nn::Linear(8, 32), fsdp::nn::ReLU(), fsdp::nn::Linear(32, 1));
    fsdp::fully_shard(net, {.mesh = mesh});
    fsdp::init_parameters( // the seed gives every rank the same values
        net, [](const std::string&, torch::Tensor& param) { param.normal_(0, 0.2); }, /*seed=*/1);

    fsdp::optim::SGD optimizer(net->parameters(), 0.1);
    const auto x = torch::linspace(-1, 1, 32).view({4, 8}) + rank;
    fsdp::CommDebugMode comm;
    net->forward(x).pow(2).mean().backward();
    optimizer.step();
    TORCH_CHECK(comm.count("reduce_scatter") == 1 && comm.count("all_reduce") == 1);

    const auto weight = fsdp::as_dtensor(net->parameters()[0]);
    if (rank == 0) {
      std::cout << weight.str() << "\n";
    }
    // The gathered weight is the same on every rank.
    const auto whole = weight.full_tensor();
    auto of_first = whole.clone();
    fsdp::default_group().broadcast(of_first, 0);
    TORCH_CHECK(torch::equal(whole, of_first));
  });
}
