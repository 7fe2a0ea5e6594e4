// ProcessGroup over a foreign c10d backend that has neither AVG nor PREMUL_SUM.
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <fsdp/distributed.h>
#include <fsdp/error.h>

#include "support/collective_checks.h"

namespace fsdp {
namespace {

/// Passes everything to `inner`, and refuses the reductions that gloo lacks.
class PlainBackend : public c10d::Backend {
 public:
  explicit PlainBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override {
    return "plain";
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return inner_->_allgather_base(out, in, options);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    check(options.reduceOp);
    return inner_->_reduce_scatter_base(out, in, options);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    check(options.reduceOp);
    return inner_->allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return inner_->broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& options) override {
    return inner_->scatter(outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& out,
      at::Tensor& in,
      std::vector<int64_t>& out_splits,
      std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions& options) override {
    return inner_->alltoall_base(out, in, out_splits, in_splits, options);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return inner_->barrier(options);
  }

 private:
  static void check(const c10d::ReduceOp& op) {
    TORCH_CHECK(
        op.op_ != c10d::ReduceOp::AVG && op.op_ != c10d::ReduceOp::PREMUL_SUM,
        "cannot do this reduction");
  }
  const c10::intrusive_ptr<c10d::Backend> inner_;
};

TEST(AnyBackend, GetsAvgAndPremulSumByEmulation) {
  run_ranks(3, [](int) {
    const ProcessGroup group(c10::make_intrusive<PlainBackend>(default_group().backend()));
    EXPECT_EQ(group.backend_name(), "plain");
    test::check_every_collective(group, 4);
    auto whole = torch::full({3}, 5, torch::kInt64);
    group.all_reduce(whole, ReduceOp::Avg);
    EXPECT_SAME(whole, torch::full({3}, 5, torch::kInt64));
  });
}

TEST(AnyBackend, CannotBeDividedByUs) {
  run_ranks(2, [](int) {
    const ProcessGroup group(c10::make_intrusive<PlainBackend>(default_group().backend()), "mine");
    const auto message = test::message_of<c10::Error>([&] { group.new_group({0, 1}); });
    EXPECT_TRUE(test::contains(message, "group 'mine'"));
  });
}

TEST(AnyBackend, FailuresBecomeCommErrors) {
  class Broken : public c10d::Backend {
   public:
    Broken() : Backend(0, 1) {}
    const std::string getBackendName() const override {
      return "broken";
    }
    c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
      throw std::runtime_error("the cable is cut");
    }
  };
  const ProcessGroup group(c10::make_intrusive<Broken>());
  const auto message = test::message_of<CommError>([&] { group.barrier(); });
  EXPECT_TRUE(test::contains(message, "barrier"));
  EXPECT_TRUE(test::contains(message, "the cable is cut"));
}

} // namespace
} // namespace fsdp
