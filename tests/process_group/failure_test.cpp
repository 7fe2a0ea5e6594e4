// Bad input and failing ranks: a clear error on every rank, and nothing hangs.
#include <ATen/Parallel.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <fsdp/device_mesh.h>
#include <fsdp/distributed.h>
#include <fsdp/dtensor.h>
#include <fsdp/error.h>

#include <atomic>
#include <thread>

#include "support/tensors.h"

namespace fsdp {
namespace {

using test::contains;
using test::message_of;

TEST(Mismatch, NamesEachRankAndWhatItBrought) {
  std::atomic<int> errors = 0;
  const auto message = message_of<CommError>([&] {
    run_ranks(3, [&](int rank) {
      auto tensor = torch::zeros({rank == 1 ? 5 : 4});
      try {
        default_group().all_reduce(tensor);
      } catch (const CommError&) {
        ++errors;
        throw;
      }
    });
  });
  EXPECT_EQ(errors, 3);
  EXPECT_TRUE(contains(message, "rank 0: all_reduce(Float[4], sum)"));
  EXPECT_TRUE(contains(message, "rank 1: all_reduce(Float[5], sum)"));
  EXPECT_TRUE(contains(message, "rank 2: all_reduce(Float[4], sum)"));
}

TEST(Mismatch, OfDtypeKindOpRootOrSplitsIsCaught) {
  const auto fails = [](const std::function<void(const ProcessGroup&)>& call) {
    const auto message =
        message_of<CommError>([&] { run_ranks(2, [&](int) { call(default_group()); }); });
    EXPECT_TRUE(contains(message, "the ranks brought different calls"));
  };
  fails([](const auto& group) {
    group.all_reduce(torch::zeros(2, group.rank() ? torch::kFloat : torch::kDouble));
  });
  fails([](const auto& group) {
    group.rank() ? group.barrier() : group.all_reduce(torch::zeros(2));
  });
  fails([](const auto& group) {
    group.all_reduce(torch::zeros(2), group.rank() ? ReduceOp::Max : ReduceOp::Sum);
  });
  fails([](const auto& group) { group.broadcast(torch::zeros(2), group.rank()); });
  fails([](const auto& group) {
    const int64_t rows = group.rank() ? 1 : 2;
    group.all_to_all(torch::zeros({4}), torch::zeros({2 * rows}), {2, 2}, {rows, rows});
  });
}

TEST(CollectiveArguments, IsRefusedBeforeItReachesAnybody) {
  run_ranks(2, [](int rank) {
    const auto group = default_group();
    const auto refused = [&](const std::string& part, const std::function<void()>& call) {
      EXPECT_TRUE(contains(message_of<c10::ValueError>(call), part));
    };
    refused("must hold 2 times", [&] { group.all_gather(torch::zeros(3), torch::zeros(2)); });
    refused("must hold 2 times", [&] { group.reduce_scatter(torch::zeros(3), torch::zeros(2)); });
    refused("not contiguous", [&] { group.all_reduce(torch::zeros({2, 3}).t()); });
    refused("undefined", [&] { group.all_reduce(torch::Tensor()); });
    refused(
        "one dtype", [&] { group.all_gather(torch::zeros(4), torch::zeros(2, torch::kDouble)); });
    refused("root 2", [&] { group.broadcast(torch::zeros(2), 2); });
    refused("is the root and brings no input", [&] {
      group.scatter(torch::zeros(2), torch::Tensor(), rank);
    });
    refused("floating point", [&] {
      group.all_reduce(torch::zeros(2, torch::kLong), ReduceOp::premul_sum(2));
    });
    refused(
        "complex", [&] { group.all_reduce(torch::zeros(2, torch::kComplexFloat), ReduceOp::Max); });
    refused("booleans", [&] { group.all_reduce(torch::zeros(2, torch::kBool), ReduceOp::Avg); });
    refused("add up", [&] { group.all_to_all(torch::zeros(4), torch::zeros(4), {1, 1}, {2, 2}); });
    refused("evenly", [&] { group.all_to_all(torch::zeros(3), torch::zeros(3)); });
    refused("not one of the ranks", [&] { group.new_group({1 - rank}); });
    refused("not all different", [&] { group.new_group({0, 0, 1}); });
    refused("7 is not a rank", [&] { group.new_group({rank, 7}); });
    auto tensor = torch::ones(2); // and the group still works
    group.all_reduce(tensor);
    EXPECT_SAME(tensor, torch::full({2}, 2.0));
  });
  EXPECT_THROW(ProcessGroup().rank(), c10::Error);
}

TEST(CollectiveArguments, LazyViewsNegativeSplitsAndOverlapsAreRefused) {
  run_ranks(2, [](int rank) {
    const auto group = default_group();
    const auto refused = [&](const std::string& part, const std::function<void()>& call) {
      EXPECT_TRUE(contains(message_of<c10::ValueError>(call), part));
    };
    const auto complex = torch::zeros(2, torch::kComplexFloat);
    refused("resolve_conj", [&] {
      group.all_gather(torch::zeros(4, torch::kComplexFloat), complex.conj());
    });
    refused("not all lengths", [&] {
      group.all_to_all(torch::zeros(4), torch::zeros(4), {2, 2}, {-1, 5});
    });
    auto buffer = torch::zeros(8);
    refused("overlap", [&] { group.all_to_all(buffer, buffer); });
    refused("overlap", [&] {
      group.all_gather(buffer, buffer.narrow(0, rank == 0 ? 4 : 0, 4)); // the other's part
    });
    refused("overlap", [&] { group.reduce_scatter(buffer.narrow(0, 1, 4), buffer); });
    auto out = torch::zeros(2);
    auto in = torch::zeros(1 << 20);
    refused("must hold 2 times", [&] { group.backend()->_allgather_base(out, in, {}); });
  });
}

TEST(Mismatch, OfThePremulFactorIsCaught) {
  const auto message = message_of<CommError>([] {
    run_ranks(2, [](int rank) {
      default_group().all_reduce(torch::ones(4), ReduceOp::premul_sum(rank + 1));
    });
  });
  EXPECT_TRUE(contains(message, "premul_sum by 2"));
}

TEST(Mismatch, OfTheTensorToDistributeIsCaught) {
  const auto message = message_of<c10::ValueError>([] {
    run_ranks(2, [](int rank) {
      const auto mesh = init_device_mesh(torch::kCPU, {2}, {"dp"});
      distribute_tensor(torch::zeros({7 + rank}), mesh, {Shard{0}});
    });
  });
  EXPECT_TRUE(contains(message, "the ranks bring different tensors"));
}

TEST(Work, MayBeWaitedForByHelperThreadsInAnyOrder) {
  run_ranks(2, [](int rank) {
    const auto a = default_group();
    const auto b = a.new_group({0, 1}, "b");
    // Each rank's helper waits for what the other rank has yet to call.
    auto first = (rank == 0 ? a : b).barrier_async();
    std::thread helper([&] { first.wait(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    (rank == 0 ? b : a).barrier();
    helper.join();
  });
}

TEST(Work, EveryWaitWaitsAndEveryWaitFails) {
  run_ranks(2, [](int rank) {
    auto tensor = torch::ones(4);
    auto work = Work();
    if (rank == 0) {
      work = default_group().all_reduce_async(tensor);
      auto copy = work;
      std::thread helper([copy]() mutable { copy.wait(); });
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      work.wait();
      EXPECT_SAME(tensor, torch::full({4}, 2.0));
      helper.join();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      default_group().all_reduce(tensor);
    }
  });
  EXPECT_THROW(
      run_ranks(
          2,
          [](int rank) {
            auto work = default_group().all_reduce_async(torch::ones(4 + rank));
            EXPECT_THROW(work.wait(), CommError);
            EXPECT_THROW(work.wait(), CommError);
            throw std::runtime_error("seen");
          }),
      c10::Error);
}

TEST(RunRanks, LeavesTheNumberOfIntraOpThreadsAsItWas) {
  const int before = at::get_num_threads();
  run_ranks(4, [](int) {});
  std::thread([&] { EXPECT_EQ(at::get_num_threads(), before); }).join();
}

TEST(RunRanks, ReleasesTheOthersWhenARankThrows) {
  std::atomic<int> released = 0;
  const auto start = std::chrono::steady_clock::now();
  const auto message = message_of<c10::Error>([&] {
    run_ranks(4, [&](int rank) {
      if (rank == 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        TORCH_CHECK(false, "out of luck");
      }
      const auto text = message_of<CommError>([] { default_group().barrier(); });
      EXPECT_TRUE(contains(text, "rank 2 failed first: out of luck"));
      ++released;
      default_group().barrier(); // and again: it throws at once
    });
  });
  EXPECT_EQ(released, 3);
  EXPECT_TRUE(contains(message, "out of luck"));
  EXPECT_TRUE(contains(message, "on rank 2 of run_ranks"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST(RunRanks, KeepsTheTypeOfC10ErrorsAndNestsOthers) {
  EXPECT_THROW(
      run_ranks(2, [](int rank) { TORCH_CHECK_VALUE(rank == 0, "bad"); }), c10::ValueError);
  const auto message = message_of<c10::Error>([] {
    run_ranks(2, [](int rank) {
      if (rank == 1)
        throw std::runtime_error("plain");
    });
  });
  EXPECT_TRUE(contains(message, "plain (on rank 1 of run_ranks)"));
  EXPECT_TRUE(
      contains(message_of<c10::Error>([] { run_ranks(1, [](int) { throw 7; }); }), "on rank 0"));
}

TEST(RunRanks, WorksAgainAfterAFailure) {
  EXPECT_ANY_THROW(run_ranks(2, [](int rank) {
    TORCH_CHECK(rank == 0);
    default_group().barrier();
  }));
  run_ranks(2, [](int) { default_group().barrier(); });
}

TEST(RunRanks, FailsWhoeverWaitsForARankThatHasEnded) {
  const auto message = message_of<CommError>([] {
    run_ranks(3, [](int rank) {
      if (rank != 1) {
        default_group().all_reduce(torch::zeros(2));
      }
    });
  });
  EXPECT_TRUE(contains(message, "all_reduce #0"));
  EXPECT_TRUE(contains(message, "rank 1 has ended and will never take part"));
}

TEST(RunRanks, DetectsThatEveryRankWaitsForAnother) {
  const auto message = message_of<CommError>([] {
    run_ranks(2, [](int rank) {
      const auto a = default_group();
      const auto b = a.new_group({0, 1}, "b");
      (rank == 0 ? a : b).barrier();
    });
  });
  EXPECT_TRUE(contains(message, "every rank waits for another"));
  EXPECT_TRUE(contains(message, "barrier #0 in group '0-1' on rank 0 waits for rank 1"));
  EXPECT_TRUE(contains(message, "barrier #0 in group '0-1/b' on rank 1 waits for rank 0"));
}

TEST(RunRanks, TimesOutWithTheNamesOfTheLate) {
  const auto message = message_of<CommError>([] {
    run_ranks(
        3,
        [](int rank) {
          if (rank == 1) {
            std::this_thread::sleep_for(std::chrono::seconds(5));
          }
          default_group().barrier();
        },
        {.timeout = std::chrono::milliseconds(1500)});
  });
  EXPECT_TRUE(contains(message, "no call from rank 1 within 1500 ms"));
}

TEST(RunRanks, RefusesAnEmptyWorld) {
  EXPECT_THROW(run_ranks(0, [](int) {}), c10::ValueError);
}

TEST(RunRanks, HasNoGroupOutsideOrInForeignThreads) {
  EXPECT_FALSE(is_initialized());
  EXPECT_THROW(default_group(), c10::Error);
  EXPECT_THROW(destroy_process_group(), c10::Error);
  run_ranks(2, [](int) { std::thread([] { EXPECT_FALSE(is_initialized()); }).join(); });
  EXPECT_FALSE(is_initialized());
}

} // namespace
} // namespace fsdp
