// A model of your own: built without memory, sharded, then initialised. It is trained
// in bfloat16 with recomputed activations and clipped gradients. At the end the program
// prints the bytes of a rank's shards.
#include <fsdp/fsdp.h>

#include <iostream>
#include <vector>

namespace nn = fsdp::nn; // instead of torch::nn: every module can be sharded

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t dim)
      : norm(register_module("norm", nn::RMSNorm(dim))),
        up(register_module("up", nn::Linear(dim, 4 * dim))),
        down(register_module("down", nn::Linear(4 * dim, dim))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return x + down(torch::gelu(up(norm(x))));
  }
  nn::RMSNorm norm;
  nn::Linear up, down;
};
FSDP_MODULE(Block); // instead of TORCH_MODULE(Block)

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t dim, int depth) : head(register_module("head", nn::Linear(dim, 1))) {
    for (int i = 0; i < depth; ++i) {
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
  nn::Linear head;
};
FSDP_MODULE(Net);

int main() {
  fsdp::run_ranks(4, [](int rank) {
    Net net{nullptr};
    {
      const fsdp::MetaInit on_meta; // shapes, but no memory
      net = Net(64, 4);
    }
    const fsdp::FullyShardOptions options{
        .mesh = fsdp::init_device_mesh(torch::kCPU, {4}),
        .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}};
    for (auto& block : net->blocks) {
      fsdp::apply_activation_checkpointing(block);
      fsdp::fully_shard(block, options);
    }
    fsdp::fully_shard(net, options);
    fsdp::to_empty(net, torch::kCPU); // allocates this rank's shards
    fsdp::init_parameters(net, [](const std::string& name, torch::Tensor& param) {
      if (param.dim() > 1) {
        param.normal_(0, 0.05);
      } else {
        param.fill_(name.find("norm") != std::string::npos ? 1 : 0);
      }
    });

    fsdp::optim::AdamW optimizer(net->parameters(), 3e-3);
    const auto x = torch::linspace(-1, 1, 16 * 64).view({16, 64}).roll(rank, 0);
    const auto y = x.slice(1, 0, 1).sin();
    double first = 0, last = 0;
    for (int step = 0; step < 20; ++step) {
      auto loss = (net(x).to(torch::kFloat) - y).pow(2).mean();
      loss.backward();
      fsdp::clip_grad_norm_(net->parameters(), 1.0);
      optimizer.step();
      optimizer.zero_grad();
      last = loss.item<double>();
      first = step == 0 ? last : first;
    }
    TORCH_CHECK(last < first, "rank ", rank, " did not learn: ", first, " -> ", last);
    if (rank == 0) {
      std::cout << "loss " << first << " -> " << last << "; shards of "
                << fsdp::memory_stats(torch::kCPU).shards << " bytes\n";
    }
  });
}
