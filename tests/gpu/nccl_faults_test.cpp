// Ranks over NCCL that die, stop, come late or disagree: the others end with an error, in time.
#include <fsdp/checkpoint.h>
#include <fsdp/checkpoint_tools.h>
#include <fsdp/error.h>
#include <fsdp/launch.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "runtime/stream.h"
#include "support/gpu.h"
#include "support/processes.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

constexpr int64_t kDim =
    96; // three ranks have parts of 16 bytes of each bias: gathers can be placed
constexpr std::chrono::seconds kTimeout{8};
constexpr double kSoon = 30; // seconds: the time-out, and what NCCL's watchdog adds

class NcclFaults : public testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    if (torch::cuda::device_count() < 3 && !nccl_shares_gpus()) {
      GTEST_SKIP() << "NCCL cannot share a GPU here";
    }
  }
};

struct PairImpl : torch::nn::Module {
  PairImpl() : a(register_module("a", MLP(kDim))), b(register_module("b", MLP(kDim))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return b(a(x));
  }
  MLP a, b;
};
FSDP_MODULE(Pair);

Pair sharded_pair() {
  const auto mesh = init_device_mesh(torch::kCUDA, {get_world_size()});
  auto net = seeded<Pair>();
  for (auto& each : {net->a, net->b}) {
    fully_shard(each, {.mesh = mesh});
  }
  fully_shard(net, {.mesh = mesh});
  return net;
}

void step(Pair& net) {
  const auto x = random_batch(0, {4, kDim}).to(detail::current_device(torch::kCUDA));
  const auto loss = net(x).square().sum();
  loss.backward();
  (void)loss.item<float>();
}

/// The error that ends a rank's training.
std::string error_of_training(Pair& net) {
  const auto start = std::chrono::steady_clock::now();
  auto message = message_of<CommError>([&] {
    while (true) {
      step(net);
    }
  });
  const auto seconds = host_ms_since(start) / 1000;
  figure("rank %d: %.1f s: %s", get_rank(), seconds, message.substr(0, 400).c_str());
  EXPECT_LT(seconds, kSoon);
  EXPECT_TRUE(contains(message, "on rank " + std::to_string(get_rank()))) << message;
  EXPECT_TRUE(contains(message, "module '")) << message;
  EXPECT_TRUE(contains(message, "all_gather") || contains(message, "reduce_scatter")) << message;
  return message;
}

/// Trains on three ranks. After two steps rank 1 does `fault`, and `expect(message)` is called on
/// the others with the error of their training.
std::vector<Ended> train_with_fault(
    const std::function<void()>& fault,
    const std::function<void(const std::string& message)>& expect,
    const std::function<void()>& before = [] {}) {
  return spawn_ranks(3, [&] {
    before();
    init_process_group({.backend = "nccl", .timeout = kTimeout});
    auto net = sharded_pair();
    const LateGathers gathers; // none is late, but it counts them
    step(net);
    step(net);
    const bool placed = detail::place_gathers() == detail::PlaceGathers::Always;
    EXPECT_EQ(gathers.num_placed > 0, placed);
    if (get_rank() == 1) {
      fault();
      return;
    }
    expect(error_of_training(net));
    std::this_thread::sleep_for(std::chrono::seconds(3)); // rank 0 serves the store
  });
}

void expect_others_passed(const std::vector<Ended>& ended) {
  for (const size_t rank : {0, 2}) {
    if (!ended.empty()) {
      EXPECT_EQ(ended[rank].exit_code, 0) << ended[rank].output;
      std::printf("%s", ended[rank].output.c_str());
    }
  }
}

TEST_F(NcclFaults, AKilledRankIsNamed) {
  const auto ended = train_with_fault(
      [] { kill(getpid(), SIGKILL); },
      [](const std::string& message) { EXPECT_TRUE(contains(message, "rank 1 is gone")); });
  expect_others_passed(ended);
}

TEST_F(NcclFaults, AStoppedRankIsATimeOut) {
  const auto ended = train_with_fault(
      [] { kill(getpid(), SIGSTOP); }, [](const std::string&) {},
      [] {
        if (std::getenv("RANK") == std::string("1") && fork() == 0) { // ends the stopped rank
          sleep(40);
          kill(getppid(), SIGKILL);
          _exit(0);
        }
      });
  expect_others_passed(ended);
}

TEST_F(NcclFaults, ALateRankIsATimeOut) {
  const auto ended = train_with_fault(
      [] { std::this_thread::sleep_for(3 * kTimeout); },
      [](const std::string& message) { EXPECT_TRUE(contains(message, "every rank is alive")); });
  expect_others_passed(ended);
}

// Placed gathers are one launch of a collective per parameter.
TEST_F(NcclFaults, ALateRankIsATimeOutOfAGroupedLaunch) {
  const auto ended = train_with_fault(
      [] { std::this_thread::sleep_for(3 * kTimeout); },
      [](const std::string& message) { EXPECT_TRUE(contains(message, "every rank is alive")); },
      [] { detail::place_gathers() = detail::PlaceGathers::Always; });
  expect_others_passed(ended);
}

TEST_F(NcclFaults, AnErrorOfOneRankEndsTheOthers) {
  const auto ended = train_with_fault(
      [] { _exit(3); },
      [](const std::string& message) { EXPECT_TRUE(contains(message, "rank 1 is gone")); });
  expect_others_passed(ended);
}

TEST_F(NcclFaults, ACallOfAnotherShapeEnds) {
  const auto ended = train_with_fault(
      [] {
        const auto mine = torch::ones(5, torch::kCUDA);
        const auto message = message_of<CommError>([&] {
          for (int i = 0; i < 100; ++i) {
            default_group().all_reduce(mine);
            (void)mine.sum().item<float>();
          }
        });
        figure("rank 1: %s", message.substr(0, 300).c_str());
      },
      [](const std::string&) {});
  expect_others_passed(ended);
}

TEST_F(NcclFaults, ASaveThatIsUnderWayIsWholeOrNotThere) {
  const auto folder = temporary_folder();
  const auto ended = spawn_ranks(
      3,
      [] {
        init_process_group({.backend = "nccl", .timeout = kTimeout});
        const std::string path = std::getenv("FSDP_TEST_FOLDER");
        auto net = sharded_pair();
        step(net);
        save(get_model_state_dict(net), path + "/first");
        auto large = get_model_state_dict(net);
        for (int i = 0; i < 3; ++i) { // so that it takes a while
          large.insert("large." + std::to_string(i), torch::zeros({64 << 20}));
        }
        auto saving = async_save(large, path + "/second");
        if (get_rank() == 1) {
          kill(getpid(), SIGKILL);
        }
        EXPECT_TRUE(contains(error_of_training(net), "rank 1 is gone"));
        const auto message = message_of<CheckpointError>([&] { saving.get(); });
        EXPECT_TRUE(contains(message, "rank 1"));
        figure("rank %d: save: %s", get_rank(), message.substr(0, 300).c_str());
        std::this_thread::sleep_for(std::chrono::seconds(3));
      },
      [&](int) { return Environment{{"FSDP_TEST_FOLDER", folder}}; });
  expect_others_passed(ended);
  if (!ended.empty()) {
    EXPECT_TRUE(verify_checkpoint(folder + "/first").problems.empty());
    if (std::filesystem::exists(folder + "/second")) {
      EXPECT_TRUE(verify_checkpoint(folder + "/second").problems.empty());
    }
  }
}

// NCCL would warn, and its watchdog could abort the process while it ends.
TEST_F(NcclFaults, AWorldThatNobodyLeavesEndsInOrder) {
  const auto ended = spawn_ranks(2, [] {
    init_process_group({.backend = "nccl", .timeout = kTimeout});
    auto net = sharded_pair();
    step(net);
    std::exit(get_rank() == 0 ? 0 : 7); // on an error, too
  });
  for (size_t rank = 0; rank < ended.size(); ++rank) {
    EXPECT_EQ(ended[rank].exit_code, rank == 0 ? 0 : 7) << ended[rank].output;
    EXPECT_FALSE(contains(ended[rank].output, "destroy_process_group")) << ended[rank].output;
    EXPECT_FALSE(contains(ended[rank].output, "terminate")) << ended[rank].output;
  }
}

} // namespace
} // namespace fsdp
