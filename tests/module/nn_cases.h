#pragma once
// Cases of built-in modules: torch's and ours are made, called and compared.

#include <ATen/CPUGeneratorImpl.h>
#include <fsdp/distributed.h>
#include <fsdp/fully_shard.h>
#include <fsdp/nn.h>
#include <torch/torch.h>

#include <mutex>

#include "support/tensors.h"

namespace fsdp::test {

using torch::Tensor;

// ------------------------------------------------------------ Inputs of a call

inline thread_local at::Generator inputs; // torch's default one is shared by the ranks
inline thread_local std::vector<Tensor> leaves;

/// A random input that gets a gradient.
inline Tensor in(at::IntArrayRef sizes) {
  leaves.push_back(torch::randn(sizes, inputs).set_requires_grad(true));
  return leaves.back();
}
/// Random indices below `n`.
inline Tensor ids(int64_t n, at::IntArrayRef sizes) {
  return torch::randint(n, sizes, inputs, torch::kLong);
}
/// Random numbers, each 1 or -1.
inline Tensor signs(at::IntArrayRef sizes) {
  return torch::randn(sizes, inputs).sign();
}
inline Tensor causal(int64_t n) {
  return torch::nn::TransformerImpl::generate_square_subsequent_mask(n);
}

// ------------------------------------------------------------ A built-in, torch's and ours

using Module = std::shared_ptr<torch::nn::Module>;

struct Subject {
  Module module;
  std::vector<Tensor> (*run)(const Module&);
};
struct Case {
  const char* name;
  Subject (*theirs)();
  Subject (*ours)();
};

struct Append {
  std::vector<Tensor>& tensors;
  void operator()(Tensor& tensor) const {
    tensors.push_back(tensor);
  }
};
template <class Holder, class Call>
std::vector<Tensor> run(const Module& module) {
  // A null pointer, and an exception, if a clone is not hooked.
  Holder holder(std::dynamic_pointer_cast<typename Holder::ContainedType>(module));
  auto result = Call()(holder);
  std::vector<Tensor> tensors;
  visit_tensors(result, Append{tensors});
  return tensors;
}
template <class Holder, class Call>
inline Subject subject(const Holder& holder, Call) {
  return {holder.ptr(), run<Holder, Call>};
}

/// CASE(Linear, (3, 4), (in({2, 3}))): how it is made, how it is called. `ns` is
/// torch::nn or fsdp::nn.
#define CASE(Name, MAKE, CALL)                                           \
  Case {                                                                 \
    #Name,                                                               \
        [] {                                                             \
          namespace ns = torch::nn;                                      \
          return subject(ns::Name MAKE, [](auto& m) { return m CALL; }); \
        },                                                               \
        [] {                                                             \
          namespace ns = fsdp::nn;                                       \
          static_assert(std::is_base_of_v<Hookable, ns::Name::Impl>);    \
          return subject(ns::Name MAKE, [](auto& m) { return m CALL; }); \
        }                                                                \
  }

inline std::mutex generator;

inline Subject seeded(Subject (*make)()) {
  std::lock_guard lock(generator);
  torch::manual_seed(7);
  return make();
}

struct Results {
  std::vector<Tensor> outputs;
  std::vector<Tensor> input_grads;
};

/// Forward and backward with the inputs of `seed`.
inline Results step(const Module& module, std::vector<Tensor> (*run)(const Module&), int seed) {
  inputs = at::make_generator<at::CPUGeneratorImpl>(seed);
  leaves.clear();
  Results results;
  Tensor loss = torch::zeros({});
  for (const auto& output : run(module)) {
    if (output.defined() && output.is_floating_point()) {
      loss = loss + output.pow(2).mean();
    }
    results.outputs.push_back(output.defined() ? output.detach().clone() : output);
  }
  if (loss.requires_grad()) {
    loss.backward();
  }
  for (const auto& leaf : leaves) {
    results.input_grads.push_back(leaf.grad());
  }
  return results;
}

inline testing::AssertionResult same_or_undefined(const Tensor& actual, const Tensor& expected) {
  if (!actual.defined() || !expected.defined()) {
    return actual.defined() == expected.defined()
               ? testing::AssertionSuccess()
               : testing::AssertionFailure() << "only one is defined";
  }
  return same(actual, expected);
}

inline void expect_same(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(same_or_undefined(actual[i], expected[i])) << i;
  }
}
inline void expect_same(const Results& actual, const Results& expected) {
  expect_same(actual.outputs, expected.outputs);
  expect_same(actual.input_grads, expected.input_grads);
}

inline std::string printed(const Module& module) {
  std::ostringstream out;
  out << *module;
  return out.str();
}

inline void expect_like_torch(const Case& c) {
  SCOPED_TRACE(c.name);
  const auto theirs = seeded(c.theirs);
  const auto ours = seeded(c.ours);
  EXPECT_EQ(printed(ours.module), printed(theirs.module));
  const std::pair<Module, Module> pairs[] = {
      {ours.module->clone(), theirs.module->clone()}, {ours.module, theirs.module}};
  for (const auto& [mine, torchs] : pairs) {
    torch::manual_seed(8); // for a dropout
    const auto results = step(mine, ours.run, 1);
    torch::manual_seed(8);
    expect_same(results, step(torchs, theirs.run, 1));
    EXPECT_EQ(mine->named_parameters().keys(), torchs->named_parameters().keys());
    for (const auto& item : torchs->named_parameters()) {
      const auto param = mine->named_parameters()[item.key()];
      EXPECT_TRUE(same_or_undefined(param, item.value())) << item.key();
      EXPECT_TRUE(same_or_undefined(param.grad(), item.value().grad()))
          << "gradient of " << item.key();
    }
    EXPECT_EQ(mine->named_buffers().keys(), torchs->named_buffers().keys());
    expect_same(mine->buffers(), torchs->buffers());
  }
}

/// This rank's rows of a parameter or gradient.
inline Tensor shard(const Tensor& whole) {
  const auto rows = (whole.size(0) + get_world_size() - 1) / get_world_size();
  const auto start = std::min<int64_t>(whole.size(0), rows * get_rank());
  return whole.narrow(0, start, std::min(rows, whole.size(0) - start));
}

/// Two steps and an evaluation on each of `n` ranks, each with inputs of its own.
inline void expect_like_torch_sharded(const Case& c, int n) {
  run_ranks(n, [&](int rank) {
    SCOPED_TRACE(c.name);
    const auto ours = seeded(c.ours);
    fully_shard(ours.module, {.reshard_after_forward = n == 2});
    std::vector<Subject> theirs;
    for (int r = 0; r < n; ++r) {
      theirs.push_back(seeded(c.theirs)); // what each rank would do alone
    }
    for (const int seed : {10, 20}) {
      const auto results = step(ours.module, ours.run, seed + rank);
      for (int r = 0; r < n; ++r) {
        const auto expected = step(theirs[r].module, theirs[r].run, seed + r);
        if (r == rank) {
          expect_same(results, expected);
        }
      }
      expect_same(ours.module->buffers(), theirs[rank].module->buffers());
      for (const auto& item : ours.module->named_parameters()) {
        EXPECT_TRUE(same_or_undefined(
            item.value().detach(),
            shard(theirs[0].module->named_parameters()[item.key()].detach())))
            << item.key();
        Tensor mean;
        for (const auto& each : theirs) {
          const auto grad = each.module->named_parameters()[item.key()].grad();
          ASSERT_EQ(item.value().grad().defined(), grad.defined()) << item.key();
          if (grad.defined()) {
            mean = mean.defined() ? mean + grad / n : grad / n;
          }
        }
        if (mean.defined()) {
          EXPECT_TRUE(torch::allclose(item.value().grad(), shard(mean), 1e-4, 1e-6))
              << "gradient of " << item.key();
        }
      }
      ours.module->zero_grad();
      for (const auto& each : theirs) {
        each.module->zero_grad();
      }
    }
    torch::NoGradGuard no_grad;
    ours.module->eval();
    theirs[rank].module->eval();
    expect_same(
        step(ours.module, ours.run, 30).outputs,
        step(theirs[rank].module, theirs[rank].run, 30).outputs);
  });
}

/// Without parameters there is nothing random to compare between threads.
inline void expect_all_like_torch(const std::vector<Case>& cases) {
  for (const auto& c : cases) {
    expect_like_torch(c);
    if (!c.ours().module->parameters().empty()) {
      expect_like_torch_sharded(c, 2);
      expect_like_torch_sharded(c, 3);
    }
  }
}

} // namespace fsdp::test
