// Exact bytes, whoever allocates and whoever frees.
#include "runtime/counting_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <fsdp/distributed.h>

#include <cstring>
#include <thread>

#include "support/tensors.h"

namespace fsdp::detail {
namespace {

int64_t current() {
  return memory_counter().current();
}
int64_t peak() {
  return memory_counter().peak();
}

bool is_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % 64 == 0;
}

torch::Tensor floats(int64_t numel) {
  return torch::empty({numel}, torch::kFloat);
}

TEST(CountingAllocator, MemoryFromBeforeIsFreedByWhoMadeIt) {
  const auto before = current();
  auto kept = torch::ones({1000}); // in a process of its own, from before
  auto resized = torch::ones({1000});
  count_cpu_memory();
  count_cpu_memory(); // no-op
  resized.resize_({100000});
  EXPECT_SAME(resized.narrow(0, 0, 1000), kept);
  kept.reset();
  resized.reset();
  EXPECT_EQ(current(), before);
}

TEST(CountingAllocator, CountsTheBytesThatWereAskedFor) {
  count_cpu_memory();
  const auto before = current();
  memory_counter().reset_peak();
  EXPECT_EQ(peak(), before);
  auto a = floats(1000);
  auto b = torch::empty({7}, torch::kByte);
  EXPECT_EQ(current() - before, 4007);
  const auto view = a.view({10, 100}); // the same memory
  auto none = floats(0);
  EXPECT_EQ(none.storage().data(), nullptr);
  EXPECT_EQ(current() - before, 4007);
  a.reset();
  EXPECT_EQ(current() - before, 4007);
  b.reset();
  EXPECT_EQ(current() - before, 4000);
  EXPECT_EQ(peak() - before, 4007);
  memory_counter().reset_peak();
  EXPECT_EQ(peak() - before, 4000);
}

TEST(CountingAllocator, AResizeHasBothForAMoment) {
  count_cpu_memory();
  const auto before = current();
  auto tensor = torch::arange(1000);
  memory_counter().reset_peak();
  tensor.resize_({3000});
  EXPECT_EQ(current() - before, 24000);
  EXPECT_EQ(peak() - before, 32000);
  EXPECT_SAME(tensor.narrow(0, 0, 1000), torch::arange(1000));
  tensor.resize_({10}); // keeps its memory
  EXPECT_EQ(current() - before, 24000);
  tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      c10::GetCPUAllocator()->allocate(0)); // as a freed buffer does
  EXPECT_EQ(current(), before);
}

TEST(CountingAllocator, MemoryIsAlignedAndCanBeWritten) {
  count_cpu_memory();
  const auto before = current();
  std::vector<torch::Tensor> tensors;
  int64_t sum = 0;
  for (const int64_t nbytes : {1, 2, 63, 64, 65, 4095, 4096, 4097, 1 << 20}) {
    tensors.push_back(torch::empty({nbytes}, torch::kByte));
    EXPECT_TRUE(is_aligned(tensors.back().data_ptr())) << nbytes;
    std::memset(tensors.back().data_ptr(), 0xff, nbytes);
    sum += nbytes;
    EXPECT_EQ(current() - before, sum);
  }
  tensors.clear();
  EXPECT_EQ(current(), before);
}

TEST(CountingAllocator, RawMemoryAndClones) {
  count_cpu_memory();
  const auto before = current();
  auto& allocator = *c10::GetCPUAllocator();
  auto* raw = allocator.raw_allocate(100);
  EXPECT_TRUE(is_aligned(raw));
  std::memset(raw, 42, 100);
  auto copy = allocator.clone(raw, 100);
  EXPECT_EQ(std::memcmp(raw, copy.get(), 100), 0);
  EXPECT_TRUE(allocator.is_simple_data_ptr(copy));
  EXPECT_EQ(copy.device(), c10::Device(c10::kCPU));
  EXPECT_EQ(current() - before, 200);
  allocator.raw_deallocate(raw);
  copy.clear();
  EXPECT_EQ(current(), before);
  EXPECT_EQ(allocator.raw_allocate(0), nullptr);
  allocator.raw_deallocate(nullptr);
  EXPECT_EQ(current(), before);
}

TEST(CountingAllocator, WhatCannotBeHadIsNotCounted) {
  count_cpu_memory();
  const auto before = current();
  EXPECT_THROW((void)c10::GetCPUAllocator()->allocate(size_t{1} << 63), c10::Error);
  EXPECT_EQ(current(), before);
}

TEST(CountingAllocator, EachRankHasItsOwnBytesWhoeverFreesThem) {
  count_cpu_memory();
  const auto of_process = current();
  std::vector<torch::Tensor> made(4);
  std::vector<int64_t> at_first(4);
  run_ranks(4, [&](int rank) {
    const auto group = default_group();
    const auto before = at_first[rank] = current();
    memory_counter().reset_peak();
    made[rank] = floats(1000 * (rank + 1));
    group.barrier();
    EXPECT_EQ(current() - before, 4000 * (rank + 1));
    EXPECT_EQ(peak() - before, 4000 * (rank + 1));
    group.barrier();
    if (rank != 3) {
      made[(rank + 1) % 3].reset(); // a neighbour's
    }
    group.barrier();
    EXPECT_EQ(current() - before, rank == 3 ? 16000 : 0);
  });
  made[3].reset(); // by the process, after its rank has ended
  run_ranks(4, [&](int rank) { EXPECT_EQ(current(), at_first[rank]) << rank; });
  EXPECT_EQ(current(), of_process);
}

TEST(CountingAllocator, ThreadsWithoutARankCountForTheProcess) {
  count_cpu_memory();
  const auto before = current();
  memory_counter().reset_peak();
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      torch::Tensor last;
      for (int round = 0; round < 1000; ++round) {
        last = floats(round % 17);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(current(), before);
  EXPECT_GE(peak() - before, 4 * 16);
  EXPECT_LE(peak() - before, 4 * 4 * (15 + 16)); // the old one goes when the new one is there
}

} // namespace
} // namespace fsdp::detail
