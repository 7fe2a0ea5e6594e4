// fsdp::optim against torch::optim: parameters and state after every step.
#include <ATen/CPUGeneratorImpl.h>
#include <fsdp/distributed.h>
#include <fsdp/fully_shard.h>
#include <fsdp/optim.h>
#include <torch/torch.h>

#include <mutex>
#include <sstream>

#include "support/tensors.h"

namespace fsdp {
namespace {

using test::contains;
using test::message_of;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;
using torch::optim::SGDParamState;
using Tensors = std::vector<torch::Tensor>;

torch::Tensor randn(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed), torch::kDouble);
}

std::vector<torch::Device> devices() {
  std::vector<torch::Device> found{torch::kCPU};
  if (torch::cuda::is_available()) {
    found.emplace_back(torch::kCUDA, 0);
  }
  return found;
}

/// Small and empty ones, with memory in several orders.
Tensors make_params(torch::TensorOptions options) {
  Tensors params;
  for (const auto& whole :
       {randn({67}, 1), randn({7, 5}, 2), randn({0, 5}, 3), randn({}, 4), randn({6, 8}, 6).t(),
        randn({6, 20}, 7).narrow(1, 3, 9),
        randn({2, 3, 4, 5}, 8).contiguous(at::MemoryFormat::ChannelsLast)}) {
    const auto param = torch::empty_strided(whole.sizes(), whole.strides(), options);
    params.push_back(param.copy_(whole).set_requires_grad(true));
  }
  return params;
}

void set_grads(const Tensors& params, int step) {
  for (size_t i = 0; i < params.size(); ++i) {
    params[i].mutable_grad() = randn(params[i].sizes(), 1000 * step + i).to(params[i].options());
  }
}

/// To 1e-6 of the largest value in float, and to rounding where that cancels.
void expect_close(const torch::Tensor& actual, const torch::Tensor& expected, double looser = 1) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type());
  if (expected.numel() > 0) {
    const double tolerance = expected.scalar_type() == torch::kDouble ? 1e-14 : 1e-6;
    const auto difference = (actual - expected).abs().max().item<double>();
    EXPECT_LE(difference, looser * tolerance * (0.1 + expected.abs().max().item<double>()));
  }
}

void expect_close(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    SCOPED_TRACE("parameter " + std::to_string(i));
    expect_close(actual[i].detach(), expected[i].detach());
  }
}

void expect_close_state(const AdamWParamState& actual, const AdamWParamState& expected) {
  EXPECT_EQ(actual.step(), expected.step());
  expect_close(actual.exp_avg(), expected.exp_avg());
  // On CUDA 1 - beta2 is rounded to float, also in Python's fused AdamW.
  const double looser = expected.exp_avg_sq().is_cuda() ? 100 : 1;
  expect_close(actual.exp_avg_sq(), expected.exp_avg_sq(), looser);
  ASSERT_EQ(actual.max_exp_avg_sq().defined(), expected.max_exp_avg_sq().defined());
  if (expected.max_exp_avg_sq().defined()) {
    expect_close(actual.max_exp_avg_sq(), expected.max_exp_avg_sq(), looser);
  }
}

void expect_close_state(const SGDParamState& actual, const SGDParamState& expected) {
  expect_close(actual.momentum_buffer(), expected.momentum_buffer());
}

template <class Optimizer>
struct Kind;
template <>
struct Kind<optim::AdamW> {
  using Torch = torch::optim::AdamW;
  using Options = AdamWOptions;
  using State = AdamWParamState;
  static Options options() {
    return Options(1e-2).weight_decay(0.1).eps(1e-3);
  }
};
template <>
struct Kind<optim::SGD> {
  using Torch = torch::optim::SGD;
  using Options = SGDOptions;
  using State = SGDParamState;
  static Options options() {
    return Options(1e-2).weight_decay(0.1).momentum(0.9).dampening(0.2);
  }
};

/// One optimizer and torch's, on equal parameters.
template <class Optimizer>
struct Both {
  using State = typename Kind<Optimizer>::State;

  Both(Tensors params, Tensors expected_params, typename Kind<Optimizer>::Options options)
      : params(std::move(params)),
        expected_params(std::move(expected_params)),
        ours(this->params, options),
        theirs(this->expected_params, options) {}
  explicit Both(
      torch::TensorOptions tensors = {},
      typename Kind<Optimizer>::Options options = Kind<Optimizer>::options())
      : Both(make_params(tensors), make_params(tensors), options) {}

  void step(int step) {
    set_grads(params, step);
    set_grads(expected_params, step);
    ours.step();
    theirs.step();
    expect_equal();
  }

  void expect_equal() {
    expect_close(params, expected_params);
    ASSERT_EQ(ours.state().size(), theirs.state().size());
    for (size_t i = 0; i < params.size(); ++i) {
      const auto expected = theirs.state().find(expected_params[i].unsafeGetTensorImpl());
      if (expected != theirs.state().end()) {
        SCOPED_TRACE("state of parameter " + std::to_string(i));
        const auto& actual = *ours.state().at(params[i].unsafeGetTensorImpl());
        expect_close_state(
            static_cast<const State&>(actual), static_cast<const State&>(*expected->second));
      }
    }
  }

  Tensors params, expected_params;
  Optimizer ours;
  typename Kind<Optimizer>::Torch theirs;
};

template <class Optimizer>
void expect_same_training(typename Kind<Optimizer>::Options options) {
  for (const auto device : devices()) {
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      SCOPED_TRACE(c10::str(dtype, " on ", device));
      Both<Optimizer> both(torch::TensorOptions(dtype).device(device), options);
      for (int step = 0; step < 20; ++step) {
        both.step(step);
        for (torch::optim::Optimizer* optimizer :
             std::initializer_list<torch::optim::Optimizer*>{&both.ours, &both.theirs}) {
          auto& group = optimizer->param_groups()[0].options();
          group.set_lr(group.get_lr() * 0.9);
        }
      }
    }
  }
}

TEST(AdamW, EqualsTorchWithAllOptions) {
  for (const double weight_decay : {0.0, 0.1}) {
    for (const bool amsgrad : {false, true}) {
      for (const double beta2 : {0.999, 0.5}) {
        SCOPED_TRACE(c10::str(weight_decay, " ", amsgrad, " ", beta2));
        expect_same_training<optim::AdamW>(AdamWOptions(1e-2)
                                               .weight_decay(weight_decay)
                                               .amsgrad(amsgrad)
                                               .betas({0.8, beta2})
                                               .eps(1e-6));
      }
    }
  }
}

TEST(SGD, EqualsTorchWithAllOptions) {
  for (const double weight_decay : {0.0, 0.1}) {
    for (const double momentum : {0.0, 0.9}) {
      for (const double dampening : {0.0, 0.3}) {
        for (const bool nesterov : {false, true}) {
          if (nesterov && (momentum == 0 || dampening != 0)) {
            continue; // refused, by torch too
          }
          SCOPED_TRACE(c10::str(weight_decay, " ", momentum, " ", dampening, " ", nesterov));
          expect_same_training<optim::SGD>(SGDOptions(1e-2)
                                               .weight_decay(weight_decay)
                                               .momentum(momentum)
                                               .dampening(dampening)
                                               .nesterov(nesterov));
        }
      }
    }
  }
}

template <class Optimizer>
class Optim : public testing::Test {};
using Optimizers = testing::Types<optim::AdamW, optim::SGD>;
TYPED_TEST_SUITE(Optim, Optimizers);

// Not to torch in half precision, which rounds after each operator.
TYPED_TEST(Optim, HalfPrecisionIsCloseToTorchInDouble) {
  // A high rate, so that the tolerance is far less than what a step changes.
  const auto options = Kind<TypeParam>::options().lr(0.5);
  for (const auto device : devices()) {
    for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
      SCOPED_TRACE(c10::str(dtype, " on ", device));
      const auto params = make_params(torch::TensorOptions(dtype).device(device));
      Tensors exact;
      for (const auto& param : params) {
        exact.push_back(param.detach().to(torch::kDouble).set_requires_grad(true));
      }
      TypeParam ours(params, options);
      typename Kind<TypeParam>::Torch theirs(exact, options);
      for (int step = 0; step < 5; ++step) {
        set_grads(params, step);
        for (size_t i = 0; i < params.size(); ++i) {
          exact[i].mutable_grad() = params[i].grad().to(torch::kDouble);
        }
        ours.step();
        theirs.step();
        for (size_t i = 0; i < params.size(); ++i) {
          const auto expected = exact[i].detach();
          const auto tolerance =
              expected.numel() > 0 ? 3e-2 * (1 + expected.abs().max()) : expected;
          EXPECT_TRUE(
              (params[i].detach() - expected).abs().le(tolerance).all().template item<bool>())
              << "parameter " << i << " in step " << step;
        }
      }
    }
  }
}

TYPED_TEST(Optim, OneGroupOfSeveralSizesDtypesAndDevices) {
  const auto mixed = [] {
    Tensors params;
    for (const auto device : devices()) {
      for (const auto dtype : {torch::kFloat, torch::kDouble}) {
        const auto some = make_params(torch::TensorOptions(dtype).device(device));
        params.insert(params.end(), some.begin(), some.end());
        // Large enough for threads.
        params.push_back(randn({33000}, 5).to(some[0].options()).set_requires_grad(true));
      }
    }
    return params;
  };
  Both<TypeParam> both(mixed(), mixed(), Kind<TypeParam>::options());
  for (int step = 0; step < 3; ++step) {
    both.step(step);
  }
}

TYPED_TEST(Optim, GroupsHaveTheirOwnOptionsAndSchedulersWork) {
  using Options = typename Kind<TypeParam>::Options;
  const auto params = make_params({});
  const auto expected_params = make_params({});
  const auto groups = [](const Tensors& all) {
    const auto middle = all.begin() + all.size() / 2;
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(Tensors(all.begin(), middle));
    groups.emplace_back(
        Tensors(middle, all.end()), std::make_unique<Options>(Options(0.5).weight_decay(0.3)));
    return groups;
  };
  TypeParam ours(groups(params), Kind<TypeParam>::options());
  typename Kind<TypeParam>::Torch theirs(groups(expected_params), Kind<TypeParam>::options());
  torch::optim::StepLR schedule(ours, 2, 0.5);
  torch::optim::StepLR expected_schedule(theirs, 2, 0.5);
  for (int step = 0; step < 6; ++step) {
    set_grads(params, step);
    set_grads(expected_params, step);
    ours.step();
    theirs.step();
    schedule.step();
    expected_schedule.step();
    expect_close(params, expected_params);
  }
}

TYPED_TEST(Optim, WithoutAGradientNothingChangesAndStepsAreCountedEach) {
  Both<TypeParam> both;
  for (int step = 0; step < 4; ++step) {
    for (const auto* params : {&both.params, &both.expected_params}) {
      set_grads(*params, step);
      for (size_t i = 0; i < params->size(); ++i) {
        if (static_cast<int>(i % 4) > step) {
          (*params)[i].mutable_grad() = torch::Tensor();
        }
      }
    }
    both.ours.step();
    both.theirs.step();
    both.expect_equal();
  }
}

TYPED_TEST(Optim, AClosureRunsWithGradients) {
  const auto param = torch::ones({3}).set_requires_grad(true);
  TypeParam optimizer(Tensors{param}, 0.1);
  torch::NoGradGuard no_grad;
  const auto loss = optimizer.step([&] {
    const auto loss = param.pow(2).sum();
    loss.backward();
    return loss;
  });
  EXPECT_EQ(loss.template item<double>(), 3);
  EXPECT_TRUE(param.lt(0.95).all().template item<bool>());
  EXPECT_FALSE(optimizer.step().defined());
}

TYPED_TEST(Optim, EveryVersionCounterMoves) {
  for (const auto device : devices()) {
    SCOPED_TRACE_OF(device);
    const auto params = make_params(device);
    TypeParam optimizer(params, 0.1);
    for (int step = 0; step < 2; ++step) {
      set_grads(params, step);
      params[0].mutable_grad() = torch::Tensor();
      std::vector<uint32_t> versions;
      for (const auto& param : params) {
        versions.push_back(param._version());
      }
      optimizer.step();
      EXPECT_EQ(params[0]._version(), versions[0]);
      for (size_t i = 1; i < params.size(); ++i) {
        EXPECT_GT(params[i]._version(), versions[i]) << i;
      }
    }
  }
}

TYPED_TEST(Optim, ArchivesAreTorchs) {
  Both<TypeParam> both;
  both.step(0);
  both.step(1);
  std::stringstream ours;
  std::stringstream theirs;
  torch::save(both.ours, ours);
  torch::save(both.theirs, theirs);

  Both<TypeParam> swapped(both.params, both.expected_params, Kind<TypeParam>::options());
  torch::load(swapped.ours, theirs);
  torch::load(swapped.theirs, ours);
  swapped.step(2);
}

TYPED_TEST(Optim, ATensorListedTwiceIsUpdatedOnce) {
  const auto tied = torch::ones({5}).set_requires_grad(true);
  const auto once = torch::ones({5}).set_requires_grad(true);
  TypeParam optimizer(Tensors{tied, tied}, 0.1);
  typename Kind<TypeParam>::Torch reference(Tensors{once}, 0.1);
  for (int step = 0; step < 3; ++step) {
    set_grads({tied}, step);
    set_grads({once}, step);
    optimizer.step();
    reference.step();
    expect_close(tied.detach(), once.detach());
  }
}

TYPED_TEST(Optim, RefusesWhatDoesNotFitBeforeAnythingChanges) {
  const auto good = torch::ones({4}).set_requires_grad(true);
  const auto bad = torch::ones({4, 2}).set_requires_grad(true);
  TypeParam optimizer(Tensors{good, bad}, Kind<TypeParam>::options());
  good.mutable_grad() = torch::ones({4});
  const auto refusal = [&](torch::Tensor grad) {
    bad.mutable_grad() = std::move(grad);
    return message_of<c10::ValueError>([&] { optimizer.step(); });
  };
  EXPECT_TRUE(contains(refusal(torch::ones({4, 2}).to_sparse()), "a gradient of layout Sparse"));
  const auto size = refusal(torch::ones({8, 2}));
  EXPECT_TRUE(contains(size, "parameter 1 of group 0, Float[4, 2] on cpu, has a gradient"));
  EXPECT_TRUE(contains(size, "Float[8, 2] on cpu"));
  EXPECT_TRUE(contains(refusal(torch::ones({4, 2}, torch::kDouble)), "Double[4, 2] on cpu"));
  EXPECT_SAME(good.detach(), torch::ones({4}));

  // The refused steps have left nothing behind.
  Both<TypeParam> both(
      {good, bad},
      {good.detach().clone().set_requires_grad(true), bad.detach().clone().set_requires_grad(true)},
      Kind<TypeParam>::options());
  set_grads(both.params, 0);
  set_grads(both.expected_params, 0);
  optimizer.step();
  both.theirs.step();
  expect_close(both.params, both.expected_params);

  bad.set_data(torch::ones({2, 2}));
  const auto state = refusal(torch::ones({2, 2}));
  EXPECT_TRUE(contains(state, "parameter 1 of group 0, Float[2, 2] on cpu, has a state"));
  EXPECT_TRUE(contains(state, "Float[4, 2] on cpu. The parameter was sharded"));
  expect_close(both.params[0].detach(), both.expected_params[0].detach());
  optimizer.state().clear();
  optimizer.step();
}

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    return last(torch::gelu(first(x)));
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(10, 7));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(7, 2)); // one of 3 has none
};
FSDP_MODULE(Net);

Net make_net() {
  static std::mutex generator; // torch's default one is shared by the ranks
  std::lock_guard lock(generator);
  torch::manual_seed(7);
  return Net();
}

torch::Tensor loss_of(Net& net, int step, int rank) {
  return net(randn({4, 10}, 100 * step + rank).to(torch::kFloat)).pow(2).mean();
}

TYPED_TEST(Optim, TrainsAShardedModelLikeTorchTheWholeOne) {
  run_ranks(3, [](int rank) {
    auto net = make_net();
    auto reference = make_net();
    fully_shard(net);
    TypeParam ours(net->parameters(), Kind<TypeParam>::options());
    typename Kind<TypeParam>::Torch theirs(reference->parameters(), Kind<TypeParam>::options());
    for (int step = 0; step < 5; ++step) {
      loss_of(net, step, rank).backward();
      ((loss_of(reference, step, 0) + loss_of(reference, step, 1) + loss_of(reference, step, 2)) /
       3)
          .backward();
      ours.step();
      theirs.step();
      ours.zero_grad();
      theirs.zero_grad();
      const auto expected = reference->named_parameters();
      for (const auto& item : net->named_parameters()) {
        const auto shards = expected[item.key()].detach().chunk(3);
        const auto shard =
            rank < static_cast<int>(shards.size()) ? shards[rank] : shards[0].narrow(0, 0, 0);
        EXPECT_TRUE(torch::allclose(item.value().detach(), shard, 1e-5, 1e-6))
            << item.key() << " in step " << step;
      }
    }
  });
}

TYPED_TEST(Optim, NoticesAStepBeforeSharding) {
  run_ranks(2, [](int) {
    auto net = make_net();
    TypeParam optimizer(net->parameters(), Kind<TypeParam>::options());
    loss_of(net, 0, 0).backward();
    optimizer.step();
    optimizer.zero_grad();
    fully_shard(net);
    loss_of(net, 1, 0).backward();
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { optimizer.step(); }),
        "The parameter was sharded, moved or cast after the state was made"));
  });
}

} // namespace
} // namespace fsdp
