// The threads backend apart from its collectives: who is a rank, and where.
#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <fsdp/distributed.h>
#include <fsdp/error.h>

#include <thread>

#include "support/collective_checks.h"

namespace fsdp {
namespace {

TEST(RunRanks, GivesEachRankItsShareOfTheCores) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  run_ranks(1, [&](int) { EXPECT_EQ(at::get_num_threads(), std::max(1, cores)); });
  run_ranks(64, [&](int) { EXPECT_EQ(at::get_num_threads(), std::max(1, cores / 64)); });
  run_ranks(2, [&](int) { EXPECT_EQ(at::get_num_threads(), 3); }, {.intra_op_threads = 3});
}

TEST(RunRanks, RunsBackwardInTheRanksOwnThread) {
  run_ranks(2, [](int rank) {
    auto leaf = torch::ones({2}, torch::requires_grad());
    const auto self = std::this_thread::get_id();
    auto product = leaf * (rank + 1);
    product.register_hook([&](const torch::Tensor& grad) {
      EXPECT_EQ(std::this_thread::get_id(), self);
      auto sum = grad.clone();
      default_group().all_reduce(sum); // a collective inside backward
      return sum;
    });
    product.sum().backward();
    EXPECT_SAME(leaf.grad(), torch::full({2}, 2.0 * (rank + 1)));
  });
}

TEST(RunRanks, AllowsAProgramToInitialiseForItself) {
  run_ranks(2, [](int rank) {
    init_process_group();
    init_process_group({.backend = "threads", .rank = rank, .world_size = 2});
    EXPECT_THROW(init_process_group({.backend = "gloo"}), ConfigError);
    EXPECT_THROW(init_process_group({.world_size = 3}), ConfigError);
    default_group().barrier();
    destroy_process_group();
    EXPECT_TRUE(is_initialized()); // run_ranks's own
  });
}

TEST(RunRanks, MayBeNested) {
  run_ranks(2, [](int outer) {
    run_ranks(3, [&](int inner) {
      EXPECT_EQ(get_world_size(), 3);
      auto tensor = torch::full({1}, inner + 10.0 * outer);
      default_group().all_reduce(tensor);
      EXPECT_EQ(tensor.item<float>(), 3 + 30 * outer);
    });
    EXPECT_EQ(get_world_size(), 2);
    default_group().barrier();
  });
}

TEST(Threads, OfTheUsersOwnMayFormAWorld) {
  const auto rank_thread = [](int rank) {
    init_process_group(
        {.backend = "threads", .init_method = "mine", .rank = rank, .world_size = 3});
    test::check_every_collective(default_group(), 4);
    destroy_process_group();
    EXPECT_FALSE(is_initialized());
  };
  for (int repeat = 0; repeat < 5; ++repeat) { // the name may be used again
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back(rank_thread, rank);
    }
    for (auto& thread : threads) {
      thread.join();
    }
  }
}

TEST(Threads, RefuseARankTwiceAndAnotherWorldSize) {
  init_process_group({.backend = "threads", .init_method = "w", .rank = 0, .world_size = 2});
  std::thread([] {
    EXPECT_TRUE(test::contains(
        test::message_of<CommError>([] {
          init_process_group(
              {.backend = "threads", .init_method = "w", .rank = 0, .world_size = 2});
        }),
        "rank 0 is taken"));
    EXPECT_TRUE(test::contains(
        test::message_of<CommError>([] {
          init_process_group(
              {.backend = "threads", .init_method = "w", .rank = 1, .world_size = 3});
        }),
        "world size 2"));
  }).join();
  destroy_process_group();
}

TEST(Threads, EndOfAThreadEndsItsRank) {
  init_process_group({.backend = "threads", .init_method = "w", .rank = 0, .world_size = 2});
  std::thread([] {
    init_process_group({.backend = "threads", .init_method = "w", .rank = 1, .world_size = 2});
  }).join();
  const auto message = test::message_of<CommError>([] { default_group().barrier(); });
  EXPECT_TRUE(test::contains(message, "rank 1 has ended"));
  destroy_process_group();
}

TEST(Collectives, LetGoOfTheTensorsWhenDone) {
  run_ranks(2, [](int rank) {
    const auto world = default_group();
    auto work = Work();
    c10::weak_intrusive_ptr<c10::TensorImpl> watched(torch::zeros(1).getIntrusivePtr());
    {
      auto tensor = torch::ones({4});
      watched = c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr());
      work = world.all_reduce_async(tensor);
    }
    world.barrier();
    if (rank == 0) {
      work.wait(); // rank 1 does not
    }
    world.barrier();
    EXPECT_TRUE(watched.expired());
  });
}

} // namespace
} // namespace fsdp
