// Tensor parallelism together with fully_shard, on a 2 x 2 mesh: two ranks share each
// matrix, and two share the batch. Loss and gradients are those of the whole model.
#include <fsdp/fsdp.h>

#include <iostream>

struct MLPImpl : torch::nn::Module {
  MLPImpl()
      : up(register_module("up", fsdp::nn::Linear(8, 32))),
        down(register_module("down", fsdp::nn::Linear(32, 8))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return down(torch::relu(up(x)));
  }
  fsdp::nn::Linear up, down;
};
FSDP_MODULE(MLP);

void fill(MLP& mlp) {
  fsdp::init_parameters(
      mlp, [](const std::string&, torch::Tensor& param) { param.normal_(0, 0.2); }, /*seed=*/1);
}

int main() {
  fsdp::run_ranks(4, [](int rank) {
    const auto mesh = fsdp::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    MLP mlp, whole;
    fsdp::parallelize_module(
        mlp, mesh["tp"], {{"up", fsdp::ColwiseParallel{}}, {"down", fsdp::RowwiseParallel{}}});
    fsdp::fully_shard(mlp, {.mesh = mesh["dp"]});
    fill(mlp); // values depend on seed and name only, so both models get the same
    fill(whole);

    // The ranks of "tp" see the same rows, those of "dp" different ones.
    const auto batch = torch::linspace(-1, 1, 4 * 8).view({4, 8});
    const auto mine = batch.narrow(0, 2 * mesh.get_local_rank("dp"), 2);
    auto loss = mlp(mine).pow(2).mean();
    loss.backward();
    auto mean = loss.detach().clone();
    fsdp::default_group().all_reduce(mean, fsdp::ReduceOp::Avg);

    auto expected = whole(batch).pow(2).mean();
    expected.backward();
    TORCH_CHECK(torch::allclose(mean, expected, 1e-5), mean.item(), " is not ", expected.item());
    const auto grad = fsdp::as_dtensor_grad(mlp->up->weight).full_tensor();
    TORCH_CHECK(torch::allclose(grad, whole->up->weight.grad(), 1e-4, 1e-6));
    if (rank == 0) {
      std::cout << fsdp::as_dtensor(mlp->up->weight).str() << "\nloss " << mean.item<float>()
                << ", as of the whole model\n";
    }
  });
}
