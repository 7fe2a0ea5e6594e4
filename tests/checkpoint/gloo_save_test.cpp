// Ranks as processes that save together, of which one dies.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>

#include "checkpoint/checkpoints.h"
#include "checkpoint/writer.h"
#include "support/processes.h"

namespace fsdp {
namespace {

using namespace test;
using namespace std::chrono_literals;

StateDict numbered(int64_t number) {
  auto state = state_with("w", torch::full({64}, number));
  return state;
}

class KilledRank : public testing::TestWithParam<int> {};

TEST_P(KilledRank, IsNoticedLongBeforeTheTimeout) {
  const auto victim = GetParam();
  const auto* given = std::getenv("TEST_FOLDER"); // in the processes
  const auto path = (given ? std::string(given) : temporary_folder()) + "/checkpoint";
  const auto ended = spawn_ranks(
      3,
      [&] {
        init_process_group({.backend = "gloo", .timeout = 20s});
        save(numbered(1), path);
        auto job = detail::begin_save(numbered(2), path, {.timeout = 1h});
        job.publication.ranks.patience = 2s;
        const ChangeHook hook([&](const char* operation, const detail::Path&) {
          if (get_rank() == victim && std::string(operation) == "write") {
            kill(getpid(), SIGKILL);
          }
        });
        const auto message = message_of<CheckpointError>([&] { detail::run_save(job); });
        EXPECT_TRUE(contains(message, c10::str(": rank ", victim, " is gone, and ", path)));
      },
      [&](int) { return Environment{{"TEST_FOLDER", path.substr(0, path.rfind('/'))}}; });
  for (int rank = 0; rank < static_cast<int>(ended.size()); ++rank) {
    EXPECT_EQ(ended[rank].exit_code, rank == victim ? 128 + SIGKILL : 0) << ended[rank].output;
  }
  if (!given) {
    auto state = numbered(0);
    load(state, path);
    EXPECT_SAME(std::get<at::Tensor>(state.at("w")), torch::full({64}, int64_t{1}));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Processes, KilledRank, testing::Values(0, 1), testing::PrintToStringParamName());

/// A world that has ended is no dead process: its saves go on.
TEST(GlooSave, OutlivesItsWorld) {
  const auto* given = std::getenv("TEST_FOLDER");
  const auto folder = given ? std::string(given) : temporary_folder();
  expect_ranks_pass(
      2,
      [&] {
        init_process_group({.backend = "gloo", .timeout = 20s});
        auto job = detail::begin_save(numbered(1), folder + "/checkpoint", {});
        job.publication.ranks.patience = 0s;
        destroy_process_group();
        if (job.publication.ranks.rank == 1) {
          sleep(3);
        }
        detail::run_save(job);
      },
      [&](int) { return Environment{{"TEST_FOLDER", folder}}; });
}

} // namespace
} // namespace fsdp
