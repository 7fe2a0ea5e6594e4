// Four ranks as threads: a mesh, a tensor that is sharded over it, and a sum over all ranks.
#include <ATen/ATen.h>
#include <fsdp/fsdp.h>

#include <iostream>

int main() {
  fsdp::run_ranks(4, [](int rank) {
    const auto mesh = fsdp::init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    const auto full = at::arange(35.0).view({7, 5});
    const auto spread = fsdp::distribute_tensor(full, mesh, {fsdp::Shard{0}, fsdp::Shard{1}});
    TORCH_CHECK(at::equal(spread.full_tensor(), full));

    auto sum = at::full({1}, rank);
    fsdp::default_group().all_reduce(sum);
    if (rank == 0) {
      std::cout << spread.str() << ", the ranks add up to " << sum.item<int>() << "\n";
    }
  });
}
