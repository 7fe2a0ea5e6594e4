// What profilers and the log see of a step.
#include <torch/csrc/autograd/profiler_kineto.h>

#include <nlohmann/json.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "support/sharded.h"

namespace fsdp::test {
namespace {

namespace profiler = torch::autograd::profiler;

struct PairImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    return second(first(x));
  }
  Linear first = register_module("0", linear(4, 4));
  Linear second = register_module("1", linear(4, 4));
};
FSDP_MODULE(Pair);

/// One step of a model whose root has no parameters, in this thread.
void one_step(const FullyShardOptions& options = {}) {
  init_process_group({.backend = "fake", .rank = 0, .world_size = 2});
  {
    Pair net;
    fully_shard(net->first, options);
    fully_shard(net->second, options);
    fully_shard(net, options);
    net(torch::randn({2, 4}, torch::requires_grad())).sum().backward();
  }
  destroy_process_group();
}

/// The names of a profile's ranges, through the trace file that people look at.
std::multiset<std::string> ranges_of(const std::function<void()>& body) {
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  const std::set<profiler::ActivityType> activities{profiler::ActivityType::CPU};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  body();
  const auto path = std::filesystem::temp_directory_path() /
                    ("fsdp_trace_" + std::to_string(::getpid()) + ".json");
  profiler::disableProfiler()->save(path);
  std::ifstream file(path);
  const auto trace = nlohmann::json::parse(file);
  std::filesystem::remove(path);
  std::multiset<std::string> names;
  for (const auto& event : trace.at("traceEvents")) {
    const auto name = event.value("name", std::string());
    if (name.starts_with("FSDP::")) {
      names.insert(name);
    }
  }
  return names;
}

TEST(Ranges, HaveUpstreamsNamesInATrace) {
  const auto names = ranges_of([] {
    one_step({.mp_policy = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat}});
  });
  for (const auto* name :
       {"FSDP::root_pre_forward", "FSDP::cast_forward_inputs", "FSDP::cast_forward_outputs",
        "FSDP::root_post_backward_callback", "FSDP::backward_prefetch for 0"}) {
    EXPECT_GE(names.count(name), 1) << name;
  }
  for (const auto* what :
       {"pre_forward", "post_forward", "pre_backward", "post_backward_reshard",
        "post_backward_rs_wait", "post_backward_reduce"}) {
    for (const auto* module : {" (0)", " (1)"}) {
      EXPECT_EQ(names.count(std::string("FSDP::") + what + module), 1) << what << module;
    }
  }
  for (const auto* what : {"all_gather", "all_gather_copy_out"}) {
    for (const auto* module : {" (0)", " (1)"}) { // forward and backward
      EXPECT_EQ(names.count(std::string("FSDP::") + what + module), 2) << what << module;
    }
  }
}

// A process of its own each: the level is read once.
class LogDeathTest : public testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
  }
  static void run_with(const char* level) {
    ::setenv("FSDP_LOG", level, 1);
    one_step();
    std::exit(0);
  }
};

TEST_F(LogDeathTest, DebugNamesEveryPhaseInOrder) {
  EXPECT_EXIT(
      run_with("debug"), testing::ExitedWithCode(0),
      "root_pre_forward(.|\n)*pre_forward \\(0\\)(.|\n)*post_forward \\(0\\)(.|\n)*"
      "pre_forward \\(1\\)(.|\n)*post_forward \\(1\\)(.|\n)*pre_backward \\(1\\)(.|\n)*"
      "post_backward \\(1\\)(.|\n)*pre_backward \\(0\\)(.|\n)*post_backward \\(0\\)(.|\n)*"
      "root_post_backward");
}

TEST_F(LogDeathTest, InfoTellsGroupsBytesAndPadding) {
  // 4 x 4 and 4 floats over two ranks: nothing to pad.
  EXPECT_EXIT(
      run_with("info"), testing::ExitedWithCode(0),
      "fsdp info group=\"0\" ranks=2 params=2 numel=20 dtype=Float .*shard_bytes=40 "
      "gathered_bytes=80 padding_bytes=0");
}

TEST_F(LogDeathTest, OffSaysNothing) {
  EXPECT_EXIT(run_with("off"), testing::ExitedWithCode(0), "^$");
}

TEST_F(LogDeathTest, AnUnknownLevelIsNamed) {
  EXPECT_EXIT(run_with("loud"), testing::ExitedWithCode(0), "FSDP_LOG=loud is not known");
}

} // namespace
} // namespace fsdp::test
