#pragma once

#include <torch/torch.h>

#include <fsdp/process_group.h>

#include "support/tensors.h"

namespace fsdp::test {

/// The input of rank `rank` in the checks below. It consists of small whole numbers, so sums are
/// exact in every dtype and in any order.
inline torch::Tensor brought(int rank, int64_t numel, torch::ScalarType type = torch::kFloat) {
  return (torch::arange(numel) % 3 + rank % 4).to(type);
}

inline torch::Tensor sum_of_all(int size, int64_t numel, torch::ScalarType type = torch::kFloat) {
  auto sum = torch::zeros({numel}, torch::kDouble);
  for (int rank = 0; rank < size; ++rank) {
    sum += brought(rank, numel, torch::kDouble);
  }
  return sum.to(type);
}

/// Compares every collective on `group` with its definition. Each rank has `numel` elements. Every
/// rank must call it.
inline void check_every_collective(
    const ProcessGroup& group, int64_t numel, torch::Device device = torch::kCPU) {
  const int n = group.size();
  const int rank = group.rank();
  const auto mine = brought(rank, numel).to(device);

  auto gathered = torch::full({n * numel}, -1.0, device);
  group.all_gather(gathered, mine);
  for (int r = 0; r < n; ++r) {
    EXPECT_SAME(gathered.narrow(0, r * numel, numel), brought(r, numel));
  }

  const auto parts = brought(rank, n * numel).to(device);
  const auto total = sum_of_all(n, n * numel);
  const auto my_part = total.narrow(0, rank * numel, numel);
  auto scattered = torch::full({numel}, -1.0, device);
  group.reduce_scatter(scattered, parts);
  EXPECT_SAME(scattered, my_part);
  EXPECT_SAME(parts, brought(rank, n * numel)); // inputs stay as they are
  group.reduce_scatter(scattered, parts, ReduceOp::Avg);
  EXPECT_CLOSE(scattered, my_part / n);
  const bool scales = n > 1 || group.backend_name() != "nccl"; // a single rank of NCCL only copies
  if (scales) {
    group.reduce_scatter(scattered, parts, ReduceOp::premul_sum(0.5));
    EXPECT_SAME(scattered, my_part * 0.5);
  }
  EXPECT_SAME(parts, brought(rank, n * numel));

  const auto reduced = [&](ReduceOp op) {
    auto tensor = mine.clone();
    group.all_reduce(tensor, op);
    return tensor;
  };
  EXPECT_SAME(reduced(ReduceOp::Sum), sum_of_all(n, numel));
  EXPECT_CLOSE(reduced(ReduceOp::Avg), sum_of_all(n, numel) / n);
  if (scales) {
    EXPECT_SAME(reduced(ReduceOp::premul_sum(2.0)), sum_of_all(n, numel) * 2);
  }
  EXPECT_SAME(reduced(ReduceOp::Max), brought(std::min(n - 1, 3), numel));
  EXPECT_SAME(reduced(ReduceOp::Min), brought(0, numel));
  auto ones = torch::full({numel}, rank == 0 ? 3.0 : 1.0, device);
  group.all_reduce(ones, ReduceOp::Product);
  EXPECT_SAME(ones, torch::full({numel}, 3.0));

  for (const int root : {0, n - 1}) {
    SCOPED_TRACE_OF(root);
    auto tensor = mine.clone();
    group.broadcast(tensor, root);
    EXPECT_SAME(tensor, brought(root, numel));
    auto part = torch::full({numel}, -1.0, device);
    group.scatter(part, rank == root ? parts : torch::Tensor(), root);
    EXPECT_SAME(part, brought(root, n * numel).narrow(0, rank * numel, numel));
  }

  auto swapped = torch::full({n * numel}, -1.0, device);
  group.all_to_all(swapped, parts);
  for (int r = 0; r < n; ++r) {
    EXPECT_SAME(
        swapped.narrow(0, r * numel, numel), brought(r, n * numel).narrow(0, rank * numel, numel));
  }

  // Rank i sends i + 1 rows of 2 to everybody.
  std::vector<int64_t> out_splits;
  for (int r = 0; r < n; ++r) {
    out_splits.push_back(r + 1);
  }
  const std::vector<int64_t> in_splits(n, rank + 1);
  auto rows = torch::full({n * (n + 1) / 2, 2}, -1.0, device);
  group.all_to_all(
      rows, torch::full({n * (rank + 1), 2}, rank + 0.5, device), out_splits, in_splits);
  int64_t start = 0;
  for (int r = 0; r < n; ++r) {
    EXPECT_SAME(rows.narrow(0, start, r + 1), torch::full({r + 1, 2}, r + 0.5));
    start += r + 1;
  }

  // Asynchronous collectives start together and are waited for in another order.
  auto a = mine.clone();
  auto b = torch::empty({n * numel}, device);
  auto first = group.all_reduce_async(a);
  auto second = group.all_gather_async(b, mine);
  auto third = group.barrier_async();
  third.wait();
  second.wait();
  first.wait();
  first.wait(); // a second time does nothing
  EXPECT_SAME(a, sum_of_all(n, numel));
  EXPECT_SAME(b, gathered);
  group.barrier();
}

} // namespace fsdp::test
