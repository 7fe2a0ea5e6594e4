#pragma once

// Mixed precision written out by hand, to hold fully_shard's against.

#include <fsdp/comm.h>

#include "support/sharded.h"

namespace fsdp::test {

constexpr auto kFp16 = torch::kHalf;
constexpr auto kBf16 = torch::kBFloat16;
constexpr auto kFp32 = torch::kFloat;
constexpr auto kFp64 = torch::kDouble;

// Bit for bit: the same kernels run on the same values, and round a part of a
// tensor as they round the whole. Those of optimizers on bf16 parameters do so
// only for multiples of 64 elements, without a tail.
constexpr double kExact = 0;

/// Writes down in which dtypes gradients are reduced.
struct DtypeRecorder : ReduceScatter {
  Work operator()(
      torch::Tensor& out,
      const torch::Tensor& in,
      ProcessGroup& group,
      ReduceOp op,
      bool) override {
    EXPECT_EQ(in.scalar_type(), out.scalar_type());
    dtypes.push_back(out.scalar_type());
    return group.reduce_scatter_async(out, in, op);
  }
  std::vector<at::ScalarType> dtypes;
};

/// The average over the ranks, or the sum divided by `factor`. bf16 is divided by
/// the collective, before it is rounded; fp16 and fp64 in two steps around it.
inline torch::Tensor averaged(torch::Tensor grad, std::optional<double> factor = std::nullopt) {
  const double ranks = get_world_size();
  const double by = factor.value_or(ranks);
  const auto group = default_group();
  if (ranks == 1) {
    return factor ? grad / by : grad;
  }
  if (grad.scalar_type() == kFp32 && !factor) {
    group.all_reduce(grad);
    return grad / by;
  }
  if (grad.scalar_type() == kFp32 || grad.scalar_type() == kBf16) {
    group.all_reduce(grad, by == ranks ? ReduceOp(ReduceOp::Avg) : ReduceOp::premul_sum(1 / by));
    return grad;
  }
  const double first = by > 4 ? 4 : 2; // for 2, 3, 4, 6 and 8
  grad = grad / first;
  group.all_reduce(grad);
  return grad / (by / first);
}

/// The casts at the border of a module, by hand.
struct Border {
  torch::Tensor enter(const torch::Tensor& x) const {
    const bool cast = policy.param_dtype && policy.cast_forward_inputs;
    return cast && x.defined() ? x.to(*policy.param_dtype) : x;
  }
  torch::Tensor leave(const torch::Tensor& x) const {
    return policy.output_dtype ? x.to(*policy.output_dtype) : x;
  }
  MixedPrecisionPolicy policy;
};

/// The unsharded model, trained by hand in the dtypes of a policy. `master` has
/// the parameters and their averaged gradients; `compute` is what forward and
/// backward see.
template <class Holder>
class ByHand {
 public:
  using PolicyOf = std::function<MixedPrecisionPolicy(const std::string& param)>;

  /// Two modules of the same values.
  ByHand(Holder first, Holder second, const MixedPrecisionPolicy& policy)
      : master(std::move(first)),
        compute(std::move(second)),
        policy_of([policy](const std::string&) { return policy; }) {}

  Holder master;
  Holder compute;
  PolicyOf policy_of; // "" asks for the root's
  std::optional<double> factor;

  /// As the root casts it.
  torch::Tensor input(const torch::Tensor& x) const {
    const auto policy = policy_of("");
    return policy.param_dtype && policy.cast_forward_inputs ? x.to(*policy.param_dtype) : x;
  }

  /// Gives `compute` master's parameters, cast. Before each forward.
  void gather() {
    visit([&](const std::string& name, const torch::Tensor& param, const torch::Tensor& low) {
      const auto dtype = policy_of(name).param_dtype;
      const bool cast = dtype && param.is_floating_point();
      low.mutable_grad() = torch::Tensor();
      low.set_data(param.detach().to(
          cast ? *dtype : param.scalar_type(), /*non_blocking=*/false, /*copy=*/true));
      low.set_requires_grad(param.requires_grad());
    });
  }

  /// Takes the gradients of one backward, in the dtype of the reduction.
  void accumulate() {
    visit([&](const std::string& name, const torch::Tensor&, const torch::Tensor& low) {
      if (low.grad().defined()) {
        auto& sum = sums_[name];
        const auto grad =
            low.grad().to(policy_of(name).reduce_dtype.value_or(low.grad().scalar_type()));
        sum = sum.defined() ? sum + grad : grad;
        low.mutable_grad() = torch::Tensor();
      }
    });
  }

  /// Averages what was accumulated, and adds it to master's gradients.
  void reduce() {
    visit([&](const std::string& name, const torch::Tensor& param, const torch::Tensor&) {
      if (auto& sum = sums_[name]; sum.defined()) {
        const auto grad = averaged(std::move(sum), factor).to(param.scalar_type());
        sum = torch::Tensor();
        param.mutable_grad() = param.grad().defined() ? param.grad() + grad : grad;
      }
    });
  }

 private:
  template <class F>
  void visit(F f) {
    const auto low = compute->named_parameters();
    std::unordered_set<const c10::TensorImpl*> seen;
    for (const auto& item : master->named_parameters()) {
      if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
        f(item.key(), item.value(), low[item.key()]);
      }
    }
  }

  std::map<std::string, torch::Tensor> sums_;
};

template <class Holder, class... Args>
ByHand<Holder> by_hand(const MixedPrecisionPolicy& policy, const Args&... args) {
  return {seeded<Holder>(args...), seeded<Holder>(args...), policy};
}

/// Adam on a sharded model and on the one by hand.
template <class Holder>
class SideBySide {
 public:
  SideBySide(Holder& net, ByHand<Holder>& reference)
      : net_(net),
        reference_(reference),
        sharded_(unique_parameters(*net), 1e-2),
        optimizer_(unique_parameters(*reference.master), 1e-2) {}

  /// After backward of both: gradients and stepped parameters are equal, and the
  /// optimizer's state is of their dtype and on the host.
  void step() {
    reference_.reduce();
    expect_parity(*net_, *reference_.master, kExact);
    sharded_.step();
    optimizer_.step();
    expect_parity(*net_, *reference_.master, kExact);
    for (const auto& param : unique_parameters(*net_)) {
      const auto found = sharded_.state().find(param.unsafeGetTensorImpl());
      if (found != sharded_.state().end()) {
        const auto& state = static_cast<const torch::optim::AdamParamState&>(*found->second);
        EXPECT_EQ(state.exp_avg().scalar_type(), param.scalar_type());
        EXPECT_EQ(state.exp_avg().sizes(), param.sizes());
        EXPECT_EQ(state.exp_avg().device(), param.device());
      }
    }
    const bool set_to_none = steps_++ % 2 == 0;
    sharded_.zero_grad(set_to_none);
    optimizer_.zero_grad(set_to_none);
  }

 private:
  Holder& net_;
  ByHand<Holder>& reference_;
  torch::optim::Adam sharded_;
  torch::optim::Adam optimizer_;
  int steps_ = 0;
};

/// A loss in the dtype of the output.
inline constexpr auto kSquares = [](auto& net, const torch::Tensor& x) {
  return (net(x) - 1).pow(2).mean();
};

/// `loss_of(net, x)` of both, with another batch of these sizes in every step.
template <class Holder, class Loss>
void train_by_hand(
    Holder& net,
    ByHand<Holder>& reference,
    const std::vector<int64_t>& sizes,
    Loss loss_of,
    int steps = 10) {
  SideBySide<Holder> both(net, reference);
  for (int step = 0; step < steps; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const auto x = random_batch(step, sizes);
    reference.gather();
    torch::Tensor loss = loss_of(net, x);
    torch::Tensor expected = loss_of(reference.compute, reference.input(x));
    EXPECT_SAME(loss.detach(), expected.detach());
    loss.backward();
    expected.backward();
    reference.accumulate();
    both.step();
  }
}

/// Each MLP a group, all with one recorder.
inline std::shared_ptr<DtypeRecorder> shard_stack(Stack& net, const FullyShardOptions& options) {
  auto recorder = std::make_shared<DtypeRecorder>();
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, options).set_custom_reduce_scatter(recorder);
  }
  fully_shard(net, options);
  return recorder;
}

} // namespace fsdp::test
