// What a Trace tells of a step.
#include <fsdp/optim.h>
#include <fsdp/trace.h>

#include <ATen/record_function.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <map>
#include <set>
#include <thread>

#include "support/processes.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;
using Json = nlohmann::json;

constexpr int64_t kDim = 8;

Stack sharded_stack() {
  auto net = seeded<Stack>(kDim, 2);
  fully_shard(net->mlps[0]);
  fully_shard(net->mlps[1]);
  fully_shard(net);
  return net;
}

void train_step(Stack& net, torch::optim::Optimizer& optimizer, int step) {
  net(random_batch(step, {4, kDim})).sum().backward();
  optimizer.step();
  optimizer.zero_grad();
}

/// The slices of one category and rank, in order.
std::vector<Json> slices(const Json& trace, const std::string& category, int rank) {
  std::vector<Json> found;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X" && event.at("cat") == category && event.at("pid") == rank) {
      found.push_back(event);
    }
  }
  return found;
}

std::multiset<std::string> names(const std::vector<Json>& events) {
  std::multiset<std::string> result;
  for (const auto& event : events) {
    result.insert(event.at("name").get<std::string>());
  }
  return result;
}

double end_of(const Json& event) {
  return event.at("ts").get<double>() + event.at("dur").get<double>();
}

/// One trace of two steps on two ranks, as the file has it.
Json two_steps() {
  const auto path = temporary_folder() + "/trace.json";
  run_ranks(2, [&](int) {
    auto net = sharded_stack();
    optim::SGD optimizer(net->parameters(), 0.1);
    train_step(net, optimizer, 0);
    Trace trace;
    for (int step = 1; step <= 2; ++step) {
      trace.begin_step(step);
      train_step(net, optimizer, step);
    }
    trace.write(path);
    EXPECT_GT(trace.waited_s(), 0);
  });
  std::ifstream file(path);
  return Json::parse(file);
}

TEST(Trace, HasModulesCollectivesAndStepsOfEveryRank) {
  const auto trace = two_steps();
  for (const int rank : {0, 1}) {
    SCOPED_TRACE_OF(rank);
    EXPECT_EQ(names(slices(trace, "step", rank)), (std::multiset<std::string>{"step 1", "step 2"}));
    for (const auto* category : {"forward", "backward"}) {
      const auto found = names(slices(trace, category, rank));
      EXPECT_GE(found.count("0"), 2) << category;
      EXPECT_GE(found.count("1"), 2) << category;
    }
    EXPECT_EQ(names(slices(trace, "optimizer", rank)).count("optimizer_step"), 2);
    const auto gathers = slices(trace, "all_gather", rank);
    EXPECT_EQ(names(gathers).count("all_gather 0"), 4); // forward and backward
    const auto reductions = slices(trace, "reduce_scatter", rank);
    EXPECT_EQ(names(reductions).count("reduce_scatter 1"), 2);
    for (const auto& each : reductions) {
      EXPECT_EQ(each.at("args").at("bytes"), 4 * (2 * 4 * kDim * kDim + 5 * kDim));
      EXPECT_FALSE(each.at("args").at("group").get<std::string>().empty());
    }
  }
}

TEST(Trace, TheThreadDoesOneThingAtATimeOnEveryTrack) {
  const auto trace = two_steps();
  std::map<std::pair<int, int>, std::vector<Json>> tracks;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X") {
      // What it does, and waiting, are one track here.
      const int track = event.at("tid") == 3 ? 2 : event.at("tid").get<int>();
      tracks[{event.at("pid").get<int>(), track}].push_back(event);
    }
  }
  for (auto& [track, events] : tracks) {
    std::ranges::sort(events, {}, [](const Json& event) { return event.at("ts").get<double>(); });
    for (size_t i = 1; i < events.size(); ++i) {
      EXPECT_LE(end_of(events[i - 1]), events[i].at("ts").get<double>() + 1e-3)
          << events[i - 1] << "\n"
          << events[i];
    }
  }
}

TEST(Trace, CountsMemoryByCategory) {
  const auto trace = two_steps();
  int64_t most_gathered = 0;
  int64_t counts = 0;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == "C") {
      ++counts;
      EXPECT_GT(event.at("args").at("shards").get<int64_t>(), 0);
      most_gathered = std::max(most_gathered, event.at("args").at("gathered").get<int64_t>());
    }
  }
  EXPECT_GT(counts, 20);
  EXPECT_GT(most_gathered, 0);
}

TEST(Trace, SeesRangesOfTheUsersAndLeavesNothingBehind) {
  {
    Trace trace({.memory = false});
    {
      RECORD_USER_SCOPE("tokenize \"text\"");
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    const auto json = Json::parse(trace.json());
    const auto found = slices(json, "user", 0);
    ASSERT_EQ(found.size(), 1);
    EXPECT_EQ(found[0].at("name"), "tokenize \"text\"");
    EXPECT_GE(found[0].at("dur").get<double>(), 2000);
    EXPECT_EQ(json.dump().find("\"memory\""), std::string::npos);
    EXPECT_FALSE(at::hasThreadLocalCallbacks()); // it has stopped
  }
  const Trace first;
  EXPECT_THROW(Trace(), c10::Error); // one at a time
  EXPECT_TRUE(at::hasThreadLocalCallbacks());
}

TEST(Trace, WritingWhereNothingCanBeWrittenFailsOnEveryRank) {
  std::atomic<int> failed{0};
  run_ranks(2, [&](int) {
    Trace trace;
    try {
      trace.write("/nowhere/at/all/trace.json");
    } catch (const c10::Error&) {
      ++failed;
    }
  });
  EXPECT_EQ(failed, 2);
}

TEST(WaitTimer, AddsUpTheTimeARankWaitsForAnother) {
  run_ranks(2, [](int rank) {
    WaitTimer timer;
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    default_group().barrier();
    if (rank == 0) {
      EXPECT_GE(timer.seconds(), 0.04);
    }
    timer.reset();
    EXPECT_EQ(timer.seconds(), 0);
  });
}

} // namespace
} // namespace fsdp
