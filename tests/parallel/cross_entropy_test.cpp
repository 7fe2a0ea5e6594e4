#include <fsdp/parallel_cross_entropy.h>

#include <torch/torch.h>

#include <fsdp/debug.h>
#include <fsdp/distributed.h>
#include <fsdp/dtensor.h>

#include <cmath>

#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;
namespace F = torch::nn::functional;
using Options = ParallelCrossEntropyOptions;

F::CrossEntropyFuncOptions for_torch(const Options& options) {
  F::CrossEntropyFuncOptions same;
  same.ignore_index(options.ignore_index).label_smoothing(options.label_smoothing);
  switch (options.reduction) {
    case at::Reduction::None:
      return same.reduction(torch::kNone);
    case at::Reduction::Sum:
      return same.reduction(torch::kSum);
    default:
      return same.reduction(torch::kMean);
  }
}

torch::Tensor local_part(const torch::Tensor& whole, const DeviceMesh& mesh) {
  const int64_t dim = whole.dim() == 1 ? 0 : 1;
  return DTensor::from_local(whole, mesh, {Replicate{}}).redistribute({Shard{dim}}).to_local();
}

/// Loss and local gradient are those of torch's cross_entropy of all classes.
void expect_equal(
    const torch::Tensor& logits,
    const torch::Tensor& targets,
    const DeviceMesh& mesh,
    const Options& options,
    double tolerance = 1e-6) {
  const auto whole = logits.detach().clone().requires_grad_();
  const auto expected = F::cross_entropy(whole, targets, for_torch(options));
  const auto part = local_part(logits, mesh).requires_grad_();
  const auto loss = parallel_cross_entropy(part, targets, mesh, options);
  EXPECT_TRUE(near(loss.detach(), expected.detach(), tolerance));
  const auto weight = torch::randn(loss.sizes(), generator(9), torch::kDouble).to(loss.dtype());
  (loss * weight).sum().backward();
  (expected * weight).sum().backward();
  EXPECT_TRUE(near(part.grad(), local_part(whole.grad(), mesh), tolerance));
}

class CrossEntropy : public testing::TestWithParam<int> {};

TEST_P(CrossEntropy, EqualsTorchOfAllClasses) {
  const int n = GetParam();
  run_ranks(n, [&](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {n}, {"tp"});
    for (const int64_t classes : {12, 7, 3}) { // even, uneven, fewer than ranks
      for (const auto& sizes :
           {std::vector<int64_t>{classes}, {5, classes}, {2, classes, 3}, {2, classes, 2, 2}}) {
        const auto logits = 4 * torch::randn(sizes, generator(1), torch::kDouble);
        auto rows = sizes;
        rows.erase(rows.begin() + (sizes.size() == 1 ? 0 : 1));
        const auto targets = torch::randint(classes, rows, generator(2), torch::kLong);
        for (const auto reduction :
             {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
          for (const double smoothing : {0.0, 0.1, 1.0}) {
            SCOPED_TRACE(c10::str(sizes, " reduction ", reduction, " smoothing ", smoothing));
            expect_equal(
                logits, targets, mesh, {.reduction = reduction, .label_smoothing = smoothing});
            if (sizes.size() > 1) {
              expect_equal(
                  logits, targets, mesh,
                  {.ignore_index = 1, .reduction = reduction, .label_smoothing = smoothing});
            }
          }
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    WorldSizes, CrossEntropy, testing::Values(1, 2, 3, 4), testing::PrintToStringParamName());

TEST(ParallelCrossEntropy, IsStable) {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {3}, {"tp"});
    const auto targets = torch::tensor({0, 5, 2, -100}, torch::kLong);
    auto logits = 1e4 * torch::randn({4, 7}, generator(1));
    expect_equal(logits, targets, mesh, {.reduction = at::Reduction::Sum}, 1e-5);
    expect_equal(logits + 1e30, targets, mesh, {}, 1e-5);
    logits = torch::randn({4, 7}, generator(1));
    logits.select(1, 6).fill_(-INFINITY); // all that the last rank has
    logits.index_put_({0, torch::indexing::Slice(1, 4)}, -INFINITY);
    expect_equal(logits, targets, mesh, {}, 1e-5);
    const auto ignored = parallel_cross_entropy(
        local_part(logits, mesh), torch::full({4}, -100, torch::kLong), mesh);
    EXPECT_TRUE(std::isnan(ignored.item<float>())); // as torch: 0 / 0
  });
}

TEST(ParallelCrossEntropy, ComputesInFloatForHalfTypes) {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {2}, {"tp"});
    const auto targets = torch::tensor({0, 5, 2, 6}, torch::kLong);
    for (const auto type : {torch::kBFloat16, torch::kHalf}) {
      SCOPED_TRACE_OF(type);
      const auto logits = torch::randn({4, 7}, generator(1)).to(type);
      expect_equal(logits, targets, mesh, {}, 2e-2);
      const auto loss = parallel_cross_entropy(local_part(logits, mesh), targets, mesh);
      EXPECT_SAME(
          loss, F::cross_entropy(logits.to(torch::kFloat), targets).to(type)); // rounded once
    }
  });
}

TEST(ParallelCrossEntropy, SendsFourNumbersPerRow) {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {2}, {"tp"});
    const auto logits = torch::randn({5, 50}).requires_grad_();
    CommDebugMode comm;
    auto loss = parallel_cross_entropy(logits, torch::arange(5), mesh);
    EXPECT_EQ(comm.count("all_reduce"), 2);
    EXPECT_EQ(comm.total(), 2);
    EXPECT_EQ(comm.bytes("all_reduce"), 4 * (6 + 15));
    comm.clear();
    loss.backward();
    EXPECT_EQ(comm.total(), 0);
    at::NoGradGuard no_grad;
    EXPECT_SAME(parallel_cross_entropy(logits, torch::arange(5), mesh), loss.detach());
  });
}

TEST(ParallelCrossEntropy, RefusesWhatDoesNotFit) {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {2}, {"tp"});
    const auto logits = torch::randn({5, 4});
    const auto refused = [&](const std::string& part, auto&&... args) {
      const auto message = message_of<c10::Error>([&] { parallel_cross_entropy(logits, args...); });
      EXPECT_TRUE(contains(message, part));
    };
    refused("need targets of sizes [5], not [4]", torch::arange(4), mesh);
    refused("probabilities are not supported", torch::ones({5, 4}), mesh);
    refused("between 0 and 1, got 2", torch::arange(5), mesh, Options{.label_smoothing = 2});
    refused("a target is none of the classes", torch::arange(5) * 2, mesh); // 8 is not
    refused("a target is none of the classes", torch::arange(5) - 1, mesh);
    const auto grid = init_device_mesh(torch::kCPU, {1, 2}, {"dp", "tp"});
    refused("mesh of one axis", torch::arange(5), grid);
  });
}

} // namespace
} // namespace fsdp
