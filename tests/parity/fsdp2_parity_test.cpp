// Training with fully_shard against the same training by the installed torch's
// Python FSDP2: losses, gradients, collectives and the order of events. The
// recipes are in fsdp2_golden.py.
#include <fsdp/debug.h>
#include <fsdp/distributed.h>
#include <fsdp/fully_shard.h>
#include <fsdp/grad_scaler.h>
#include <fsdp/optim.h>
#include <fsdp/tensor_parallel.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <set>

#include "support/models.h"
#include "support/tensors.h"

namespace fsdp {
namespace {

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

/// from[key][index] of a list, by step or microbatch.
c10::IValue at_index(const Dict& from, const std::string& key, int64_t index) {
  return from.at(key).toListRef()[index];
}

std::optional<at::ScalarType> dtype_of(const Dict& recipe, const std::string& key) {
  static const std::map<std::string, at::ScalarType> dtypes{
      {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}, {"float32", at::kFloat}};
  const auto name = recipe.at(key);
  return name.isNone() ? std::nullopt : std::optional(dtypes.at(name.toStringRef()));
}

/// Whether the recipe's list of that key has a beginning of `name`.
bool names(const Dict& recipe, const std::string& key, const std::string& name) {
  const auto beginnings = recipe.at(key).toListRef();
  return std::any_of(beginnings.begin(), beginnings.end(), [&](const auto& beginning) {
    return name.starts_with(beginning.toStringRef());
  });
}

std::vector<std::string> strings(const c10::IValue& list) {
  std::vector<std::string> result;
  for (const auto& each : list.toListRef()) {
    result.push_back(each.toStringRef());
  }
  return result;
}

std::vector<int64_t> mesh_sizes(const Dict& recipe) {
  std::vector<int64_t> sizes;
  for (const auto& size : recipe.at("sizes").toListRef()) {
    sizes.push_back(size.toInt());
  }
  return sizes;
}

/// How many ranks get the same input.
int64_t tp_size(const Dict& recipe) {
  const auto axes = strings(recipe.at("axes"));
  return !axes.empty() && axes.back() == "tp" ? mesh_sizes(recipe).back() : 1;
}

/// Returns why there is nothing to compare with. Throws if Python's training failed.
std::string why_nothing_to_compare() {
  if (std::string(FSDP_TEST_PYTHON).empty()) {
    return "built without FSDP_PYTHON";
  }
  const auto failure = text_of(FSDP_GOLDEN_DIR "/failed");
  TORCH_CHECK(failure.empty(), "fsdp2_golden.py failed:\n", failure);
  return text_of(FSDP_GOLDEN_DIR "/missing");
}

// ------------------------------------------------------------ The same in C++

/// By sizes and value; to the bit, and by dtype, where both sides do the same in
/// the same order.
testing::AssertionResult matches(
    const torch::Tensor& actual, const c10::IValue& expected, bool exact, double tolerance = 1e-5) {
  if (expected.isNone() || !actual.defined()) {
    return expected.isNone() && !actual.defined()
               ? testing::AssertionSuccess()
               : testing::AssertionFailure() << "is " << (actual.defined() ? "there" : "missing");
  }
  const auto& other = expected.toTensor();
  if (exact) {
    return same(actual, other);
  }
  if (actual.sizes() != other.sizes()) {
    return testing::AssertionFailure() << "is not of sizes " << other.sizes();
  }
  if (torch::allclose(actual, other, tolerance, 5e-6)) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure()
         << "differs by up to " << (actual - other).abs().max().item<float>();
}

struct Net {
  std::shared_ptr<torch::nn::Module> root;
  std::vector<std::shared_ptr<torch::nn::Module>> blocks;
  ParallelPlan plan; // of a block
  std::function<torch::Tensor(const torch::Tensor&)> loss;
};

Net make_transformer() {
  Transformer net(ModelArgs{.n_layers = 3, .dropout_p = 0});
  return {
      net.ptr(),
      {net->layers->begin(), net->layers->end()},
      {{"attention.w[qkv]", ColwiseParallel{}},
       {"attention.wo", RowwiseParallel{}},
       {"feed_forward.w1", ColwiseParallel{}},
       {"feed_forward.w2", RowwiseParallel{}}},
      [net](const auto& tokens) mutable {
        const auto logits = net(tokens).slice(1, 0, -1).flatten(0, 1);
        return torch::cross_entropy_loss(logits, tokens.slice(1, 1).flatten());
      }};
}

Net make_mlps(int64_t dim) {
  Sequential net;
  for (const int64_t multiplier : {3, 4, 3}) {
    net->push_back(MLP(dim, true, false, multiplier));
  }
  return {
      net.ptr(),
      net->children(),
      {{"in_proj", ColwiseParallel{}}, {"out_proj", RowwiseParallel{}}},
      [net](const auto& x) mutable { return (net(x) - 1).pow(2).mean(); }};
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

void parallelize(Net& net, const DeviceMesh& tp) {
  for (const auto& block : net.blocks) {
    parallelize_module(block, tp, net.plan);
    if (auto* transformer = block->as<TransformerBlockImpl>()) {
      transformer->attention->args.n_heads /= tp.size();
    }
  }
}

void shard_net(Net& net, const Dict& recipe) {
  FullyShardOptions options;
  if (auto axes = strings(recipe.at("axes")); !axes.empty()) {
    const auto mesh = init_device_mesh(torch::kCPU, mesh_sizes(recipe), axes);
    if (axes.back() == "tp") {
      parallelize(net, mesh["tp"]);
      axes.pop_back();
    }
    if (axes.empty()) {
      return;
    }
    options.mesh = mesh[axes];
  }
  const auto reshard = recipe.at("reshard");
  if (reshard.isBool()) {
    options.reshard_after_forward = reshard.toBool();
  } else if (reshard.isInt()) {
    options.reshard_after_forward = reshard.toInt();
  }
  for (auto& item : net.root->named_parameters()) {
    item.value().set_requires_grad(!names(recipe, "frozen", item.key()));
    if (names(recipe, "ignored", item.key())) {
      options.ignored_params.push_back(item.value());
    }
  }
  auto& policy = options.mp_policy;
  policy.reduce_dtype = dtype_of(recipe, "reduce_dtype");
  if (recipe.at("float_norms").toBool()) {
    policy.param_dtype = at::kFloat;
    policy.output_dtype = dtype_of(recipe, "param_dtype");
    for (const auto& module : net.root->modules()) {
      if (module->as<torch::nn::LayerNormImpl>() != nullptr) {
        fully_shard(module, options);
      }
    }
  }
  policy.param_dtype = dtype_of(recipe, "param_dtype");
  policy.output_dtype = std::nullopt;
  for (const auto& block : net.blocks) {
    fully_shard(block, options);
  }
  policy.output_dtype = dtype_of(recipe, "output_dtype");
  fully_shard(net.root, options);
}

/// Events and collectives of one forward or backward, compared in the end.
class Recorded {
 public:
  Recorded(const Dict& golden, std::string phase, int64_t index)
      : golden_(golden), phase_(std::move(phase)), index_(index) {}
  ~Recorded() {
    EXPECT_EQ(events_.lines(), strings(of("events")));
    if (tp_size(dict(golden_, "recipe")) > 1) {
      return; // Python's counts are without those of tensor parallelism
    }
    // Divided over neighbours, ours is padded for alignment.
    const bool same_bytes = !dict(golden_, "recipe").at("reshard").isInt();
    int64_t total = 0;
    for (const auto& item : of("counts").toGenericDict()) {
      const auto op = item.key().toStringRef();
      EXPECT_EQ(collectives_.count(op), item.value().toInt()) << op;
      if (same_bytes) {
        EXPECT_EQ(collectives_.bytes(op), of("bytes").toGenericDict().at(op).toInt()) << op;
      }
      total += item.value().toInt();
    }
    EXPECT_EQ(collectives_.total(), total);
  }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

 private:
  c10::IValue of(const std::string& what) const {
    return at_index(dict(golden_, what), phase_, index_);
  }
  const Dict golden_;
  const std::string phase_;
  const int64_t index_;
  const EventLog events_;
  const CommDebugMode collectives_;
};

/// One of Python's runs, done again.
class Replay {
 public:
  Replay(const std::string& model, const Dict& start, const Dict& golden)
      : start_(start),
        golden_(golden),
        recipe_(dict(golden, "recipe")),
        exact_(recipe_.at("exact").toBool()),
        net_(make_net(model, start)) {
    shard_net(net_, recipe_);
    params_ = net_.root->named_parameters();
    const auto unique = unique_parameters(*net_.root);
    const torch::optim::AdamWOptions options(1e-2);
    optimizer_ = exact_ ? std::make_unique<optim::AdamW>(unique, options)
                        : std::make_unique<torch::optim::AdamW>(unique, options);
    const auto scale = recipe_.at("scale");
    scaler_ = GradScaler(
        {.init_scale = scale.isNone() ? 1 : scale.toDouble(),
         .growth_interval = 3,
         .enabled = !scale.isNone()});
  }

  void run() {
    const auto num_steps = static_cast<int64_t>(golden_.at("scales").toListRef().size());
    for (int64_t step = 0; step < num_steps; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      train(step);
    }
    for (const auto& item : dict(golden_, "params")) {
      const auto name = item.key().toStringRef();
      EXPECT_TRUE(matches(params_[name].detach(), item.value(), exact_)) << name << " in the end";
    }
  }

 private:
  void train(int64_t step) {
    for (auto& item : params_) {
      if (step == recipe_.at("thaw_step").toInt() && names(recipe_, "thawed", item.key())) {
        item.value().set_requires_grad(true);
      }
    }
    backward(step);
    average_ignored();
    if (scaler_.is_enabled() && get_rank() == 1 && step == recipe_.at("inf_step").toInt()) {
      params_[0].value().grad().view(-1)[0] = std::numeric_limits<float>::infinity();
    }
    scaler_.unscale_(*optimizer_);
    for (const auto& item : dict(golden_, "grads")) {
      const auto name = item.key().toStringRef();
      EXPECT_TRUE(matches(params_[name].grad(), item.value().toListRef()[step], exact_))
          << name << "'s gradient";
    }
    scaler_.step(*optimizer_);
    scaler_.update();
    EXPECT_EQ(scaler_.get_scale(), at_index(golden_, "scales", step).toDouble());
    optimizer_->zero_grad(/*set_to_none=*/step % 2 == 0);
  }

  void backward(int64_t step) {
    const auto& inputs = start_.at("inputs").toListRef();
    const auto num_steps = static_cast<int64_t>(inputs.size());
    const auto microbatches = recipe_.at("microbatches").toInt();
    const auto reshard = recipe_.at("reshard");
    for (int64_t i = 0; i < microbatches; ++i) {
      const bool is_last = i == microbatches - 1;
      const auto index = step * microbatches + i;
      if (is_fsdp_module(net_.root)) {
        auto root = FSDPModule::of(net_.root);
        root.set_requires_gradient_sync(is_last);
        root.set_reshard_after_backward(is_last || !reshard.isBool() || reshard.toBool());
      }
      const auto& all_inputs = inputs[(step + i) % num_steps].toListRef();
      const auto input = all_inputs[get_rank() / tp_size(recipe_)].toTensor();
      const auto loss = [&] {
        const Recorded recorded(golden_, "forward", index);
        return net_.loss(input);
      }();
      EXPECT_TRUE(matches(loss.detach(), golden_.at("losses").toTensor()[index], exact_, 1e-6))
          << "loss " << i;
      const auto scaled = scaler_.scale(loss);
      const Recorded recorded(golden_, "backward", index);
      scaled.backward();
    }
  }

  void average_ignored() {
    for (const auto& item : params_) {
      if (names(recipe_, "ignored", item.key())) {
        default_group().all_reduce(item.value().grad(), ReduceOp::Avg);
      }
    }
  }

  const Dict start_, golden_, recipe_;
  const bool exact_;
  Net net_;
  torch::OrderedDict<std::string, torch::Tensor> params_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  GradScaler scaler_;
};

// ------------------------------------------------------------ Tests

class Fsdp2Models : public testing::Test {
 protected:
  void SetUp() override {
    if (const auto why_not = why_nothing_to_compare(); !why_not.empty()) {
      GTEST_SKIP() << why_not;
    }
  }
};

TEST_F(Fsdp2Models, HavePythonsParameters) {
  for (const std::string model : {"transformer", "mlps"}) {
    SCOPED_TRACE(model);
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

struct Case {
  std::string model;
  int world;
  std::string recipe;
  std::string name(const char* separator) const {
    return model + separator + std::to_string(world) + separator + recipe;
  }
};
std::ostream& operator<<(std::ostream& out, const Case& each) {
  return out << each.name(".");
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const std::vector<std::string>& recipes, const std::vector<int>& worlds,
                       const std::vector<std::string>& models = {"transformer", "mlps"}) {
    for (const auto& recipe : recipes) {
      for (const int world : worlds) {
        for (const auto& model : models) {
          all.push_back({model, world, recipe});
        }
      }
    }
  };
  add({"true", "false", "none"}, {1, 2, 3, 4});
  add({"bf16"}, {1, 2, 4});
  add({"2", "bf16_kept", "bf16_accumulated", "bf16_reduced", "float_reduced_in_bf16",
       "float_norms"},
      {2, 4});
  add({"fp16_scaled", "ignored", "frozen"}, {2, 4}, {"mlps"});
  add({"bf16_frozen"}, {2, 4}, {"transformer"});
  add({"hsdp", "2d"}, {4});
  add({"hsdp_accumulated"}, {4}, {"mlps"});
  add({"tp"}, {2});
  add({"3d"}, {8}, {"mlps"});
  return all;
}

TEST_F(Fsdp2Models, AreTrainedByEveryRecipe) {
  std::set<std::string> written, replayed{"transformer.pt", "mlps.pt", "made"};
  for (const auto& file : std::filesystem::directory_iterator(FSDP_GOLDEN_DIR)) {
    written.insert(file.path().filename());
  }
  for (const auto& each : cases()) {
    for (int rank = 0; rank < each.world; ++rank) {
      replayed.insert(each.name(".") + "." + std::to_string(rank) + ".pt");
    }
  }
  EXPECT_EQ(replayed, written);
}

class Fsdp2Parity : public Fsdp2Models, public testing::WithParamInterface<Case> {};

TEST_P(Fsdp2Parity, TrainsLikePython) {
  const auto& each = GetParam();
  run_ranks(each.world, [&](int rank) {
    torch::set_num_threads(1);
    Replay(each.model, read(each.model), read(each.name(".") + "." + std::to_string(rank))).run();
  });
}

INSTANTIATE_TEST_SUITE_P(All, Fsdp2Parity, testing::ValuesIn(cases()), [](const auto& info) {
  return info.param.name("_");
});

} // namespace
} // namespace fsdp
