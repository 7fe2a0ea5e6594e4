// Training with fully_shard against the same training by the installed torch's
// Python FSDP2: losses, gradients, collectives and the order of events.
#include <fcntl.h>
#include <fsdp/debug.h>
#include <fsdp/distributed.h>
#include <fsdp/fully_shard.h>
#include <sys/file.h>
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "support/models.h"
#include "support/processes.h"
#include "support/tensors.h"

namespace fsdp {
namespace {

/// Events and collectives of one forward or backward.
struct Recorded {
  EventLog events;
  CommDebugMode collectives;
  void expect(
      const std::vector<std::string>& lines, const std::map<std::string, int64_t>& counts) const {
    EXPECT_EQ(events.lines(), lines);
    int64_t total = 0;
    for (const auto& [name, count] : counts) {
      EXPECT_EQ(collectives.count(name), count) << name;
      total += count;
    }
    EXPECT_EQ(collectives.total(), total);
  }
};

using namespace test;
using Dict = c10::impl::GenericDict;

// ------------------------------------------------------------ What Python wrote

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

Dict read(const std::string& name) {
  const auto text = text_of(FSDP_GOLDEN_DIR "/" + name + ".pt");
  TORCH_CHECK(!text.empty(), "nothing in " FSDP_GOLDEN_DIR "/", name, ".pt");
  return torch::pickle_load({text.begin(), text.end()}).toGenericDict();
}

Dict dict(const Dict& from, const std::string& key) {
  return from.at(key).toGenericDict();
}

/// from[key][step] of a list by step.
c10::IValue at_step(const Dict& from, const std::string& key, int64_t step) {
  return from.at(key).toListRef()[step];
}

/// Lets Python train once for all tests and all processes that run them: again
/// only with another torch or another script. Returns why there is nothing.
std::string prepare() {
  if (std::string(FSDP_TEST_PYTHON).empty()) {
    return "built without FSDP_PYTHON";
  }
  struct Lock {
    int fd = open(FSDP_GOLDEN_DIR ".lock", O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    Lock() {
      TORCH_CHECK(fd >= 0 && flock(fd, LOCK_EX) == 0, "cannot lock " FSDP_GOLDEN_DIR ".lock");
    }
    ~Lock() {
      close(fd);
    }
  } lock;
  const std::string script = FSDP_TEST_DIR "/parity/fsdp2_golden.py";
  const std::string stamp = FSDP_GOLDEN_DIR "/made_by";
  const auto made_by = TORCH_VERSION "\n" FSDP_TEST_PYTHON "\n" + text_of(script);
  if (text_of(stamp) == made_by) {
    return "";
  }
  std::filesystem::remove(stamp);
  const auto ended = run_commands(
      {{{FSDP_TEST_PYTHON, script, FSDP_GOLDEN_DIR}, {{"OMP_NUM_THREADS", "1"}}}},
      std::chrono::seconds(240))[0];
  if (ended.exit_code == 77) {
    return "no FSDP2 in " FSDP_TEST_PYTHON ": " + ended.output;
  }
  TORCH_CHECK(ended.exit_code == 0, script, " failed:\n", ended.output);
  std::ofstream(stamp, std::ios::binary) << made_by;
  return "";
}

// ------------------------------------------------------------ The same in C++

testing::AssertionResult near(const torch::Tensor& actual, const torch::Tensor& expected) {
  if (!actual.defined() || actual.sizes() != expected.sizes()) {
    return testing::AssertionFailure() << "is not of sizes " << expected.sizes();
  }
  if (torch::allclose(actual, expected, 1e-4, 1e-6)) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure()
         << "differs by up to " << (actual - expected).abs().max().item<float>();
}

struct Net {
  std::shared_ptr<torch::nn::Module> root;
  std::vector<std::shared_ptr<torch::nn::Module>> blocks;
  std::function<torch::Tensor(const torch::Tensor&)> loss;
};

Net make_transformer() {
  Transformer net(ModelArgs{.n_layers = 3, .dropout_p = 0});
  return {net.ptr(), {net->layers->begin(), net->layers->end()}, [net](const auto& tokens) mutable {
            const auto logits = net(tokens).slice(1, 0, -1).flatten(0, 1);
            return torch::cross_entropy_loss(logits, tokens.slice(1, 1).flatten());
          }};
}

Net make_mlps(int64_t dim) {
  Sequential net;
  for (const int64_t multiplier : {3, 4, 3}) {
    net->push_back(MLP(dim, true, false, multiplier));
  }
  return {net.ptr(), net->children(), [net](const auto& x) mutable {
            return (net(x) - 1).pow(2).mean();
          }};
}

Net make_net(const std::string& model, const Dict& start) {
  const auto params = dict(start, "params");
  auto net = model == "transformer" ? make_transformer()
                                    : make_mlps(params.at("0.out_proj.bias").toTensor().numel());
  torch::NoGradGuard no_grad;
  const auto named = net.root->named_parameters();
  for (const auto& item : params) {
    named[item.key().toStringRef()].copy_(item.value().toTensor());
  }
  return net;
}

void shard_net(Net& net, const std::string& reshard) {
  FullyShardOptions options;
  if (reshard == "true" || reshard == "false") {
    options.reshard_after_forward = reshard == "true";
  } else if (reshard != "none") {
    options.reshard_after_forward = std::stoi(reshard);
  }
  for (const auto& block : net.blocks) {
    fully_shard(block, options);
  }
  fully_shard(net.root, options);
}

void expect_recorded(
    const Recorded& recorded, const Dict& golden, const std::string& phase, int64_t step) {
  std::vector<std::string> lines;
  for (const auto& line : at_step(dict(golden, "events"), phase, step).toListRef()) {
    lines.push_back(line.toStringRef());
  }
  std::map<std::string, int64_t> counts;
  for (const auto& count : at_step(dict(golden, "counts"), phase, step).toGenericDict()) {
    counts[count.key().toStringRef()] = count.value().toInt();
  }
  recorded.expect(lines, counts);
}

void train_and_compare(
    const std::string& model, const std::string& reshard, const Dict& start, const Dict& golden) {
  auto net = make_net(model, start);
  shard_net(net, reshard);
  torch::optim::AdamW optimizer(unique_parameters(*net.root), 1e-2);
  const auto params = net.root->named_parameters();
  const auto losses = golden.at("losses").toTensor();
  for (int64_t step = 0; step < losses.size(0); ++step) {
    SCOPED_TRACE("rank " + std::to_string(get_rank()) + ", step " + std::to_string(step));
    const auto input = at_step(start, "inputs", step).toListRef()[get_rank()].toTensor();
    const auto loss = [&] {
      const Recorded forward;
      auto result = net.loss(input);
      expect_recorded(forward, golden, "forward", step);
      return result;
    }();
    {
      const Recorded backward;
      loss.backward();
      expect_recorded(backward, golden, "backward", step);
    }
    const auto expected = losses[step].item<float>();
    EXPECT_NEAR(loss.item<float>(), expected, 1e-6 * std::abs(expected));
    for (const auto& item : dict(golden, "grads")) {
      const auto name = item.key().toStringRef();
      EXPECT_TRUE(near(params[name].grad(), item.value().toTensor()[step]))
          << name << "'s gradient";
    }
    optimizer.step();
    optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
  }
  for (const auto& item : dict(golden, "params")) {
    const auto name = item.key().toStringRef();
    EXPECT_TRUE(near(params[name].detach(), item.value().toTensor())) << name << " in the end";
  }
}

// ------------------------------------------------------------ Tests

class Fsdp2Models : public testing::Test {
 protected:
  void SetUp() override {
    if (const auto why_not = prepare(); !why_not.empty()) {
      GTEST_SKIP() << why_not;
    }
  }
};

TEST_F(Fsdp2Models, HavePythonsParameters) {
  for (const std::string model : {"transformer", "mlps"}) {
    const auto start = read(model);
    const auto net = make_net(model, start);
    std::vector<std::string> names, expected;
    std::set<const c10::TensorImpl*> seen; // Python names what is tied once, as it comes first
    for (const auto& item : net.root->named_parameters()) {
      if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
        names.push_back(item.key());
      }
    }
    for (const auto& item : dict(start, "params")) {
      expected.push_back(item.key().toStringRef());
    }
    EXPECT_EQ(names, expected);
    EXPECT_EQ(unique_parameters(*net.root).size(), expected.size());
  }
}

using Case = std::tuple<std::string, int, std::string>;
class Fsdp2Parity : public Fsdp2Models, public testing::WithParamInterface<Case> {};

TEST_P(Fsdp2Parity, TrainsLikePython) {
  const auto& [model, world, reshard] = GetParam();
  run_ranks(world, [&](int rank) {
    torch::set_num_threads(1);
    const auto run =
        model + "." + std::to_string(world) + "." + reshard + "." + std::to_string(rank);
    train_and_compare(model, reshard, read(model), read(run));
  });
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto* model : {"transformer", "mlps"}) {
    for (const int world : {1, 2, 3, 4}) {
      for (const auto* reshard : {"true", "false", "none"}) {
        all.emplace_back(model, world, reshard);
      }
      if (world % 2 == 0) {
        all.emplace_back(model, world, "2");
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Fsdp2Parity, testing::ValuesIn(cases()), [](const auto& info) {
  return std::get<0>(info.param) + "_" + std::to_string(std::get<1>(info.param)) + "_" +
         std::get<2>(info.param);
});

} // namespace
} // namespace fsdp
