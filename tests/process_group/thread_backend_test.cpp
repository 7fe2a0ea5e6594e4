// The threads backend apart from its collectives: who is a rank, and where.
#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <fsdp/distributed.h>
#include <fsdp/error.h>

#include <thread>

#include "process_group/threads/thread_world.h"
#include "support/collective_checks.h"

namespace fsdp {
namespace {

TEST(RunRanks, GivesEachRankItsShareOfTheCores) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const int before = at::get_num_threads();
  run_ranks(1, [&](int) { EXPECT_EQ(at::get_num_threads(), std::min(before, cores)); });
  run_ranks(64, [&](int) { EXPECT_EQ(at::get_num_threads(), std::max(1, cores / 64)); });
  run_ranks(2, [&](int) { EXPECT_EQ(at::get_num_threads(), 3); }, {.intra_op_threads = 3});
  at::set_num_threads(1); // as by OMP_NUM_THREADS
  run_ranks(1, [&](int) { EXPECT_EQ(at::get_num_threads(), 1); });
  at::set_num_threads(before);
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

// Part 1 of this all-gather fails at once, while part 0 copies much: rank 1 must not get its
// error, and then write to its tensors, before part 0 has read them.
TEST(Collectives, AnErrorComesWhenNobodyReadsTheTensorsAnyMore) {
  constexpr int64_t kNumel = 1 << 23;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto world = std::make_shared<detail::ThreadWorld>(2, std::chrono::seconds(60));
    const auto group = world->group("pair", {0, 1});
    auto outputs = std::vector{torch::zeros({2 * kNumel}), torch::zeros({kNumel, 2}).t()};
    const auto run = [&](int rank) {
      world->enter(rank);
      auto input = torch::ones({kNumel});
      const auto pending = group->post(
          rank, {.kind = detail::CollectiveKind::AllGather,
                 .output = outputs[rank], // rank 1's has no flat view, which nobody has checked
                 .input = input});
      std::this_thread::sleep_for(std::chrono::milliseconds(rank * 2)); // part 0 is rank 0's
      EXPECT_THROW(group->wait(rank, *pending), CommError);
      input.fill_(-1);
      world->leave(rank);
    };
    std::thread first(run, 0);
    std::thread second(run, 1);
    first.join();
    second.join();
    const auto received = outputs[0].narrow(0, kNumel, kNumel); // or part 0 did not begin
    EXPECT_TRUE((received == received[0]).all().item<bool>() && received[0].item<float>() >= 0);
  }
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
