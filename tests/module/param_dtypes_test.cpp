// Parameters that are integers, complex numbers or of eight bits.
#include <fsdp/debug.h>

#include "module/by_hand.h"

namespace fsdp {
namespace {

using namespace test;

/// Two linears and an order of their outputs.
struct OrderedImpl : torch::nn::Module {
  OrderedImpl()
      : lin1(register_module("lin1", linear(16, 16))),
        lin2(register_module("lin2", linear(16, 16))),
        order(register_parameter("order", torch::arange(15, -1, -1), /*requires_grad=*/false)) {}
  torch::Tensor forward(const torch::Tensor& x) {
    EXPECT_EQ(order.scalar_type(), torch::kLong);
    return lin2(torch::relu(lin1(x))).index_select(1, order);
  }
  Linear lin1, lin2;
  torch::Tensor order;
};
FSDP_MODULE(Ordered);

TEST(ParamDtypes, UnfrozenAfterAFirstForwardWithoutGradients) {
  for (const int n : {1, 2, 3}) {
    run_ranks(n, [n](int) {
      const MixedPrecisionPolicy policy{.param_dtype = kBf16, .reduce_dtype = kFp32};
      auto net = seeded<Ordered>();
      auto reference = by_hand<Ordered>(policy);
      const auto set = [](OrderedImpl& each, bool requires_grad) {
        for (auto* lin : {&each.lin1, &each.lin2}) {
          (*lin)->weight.set_requires_grad(requires_grad);
          (*lin)->bias.set_requires_grad(requires_grad);
        }
      };
      const auto recorder = std::make_shared<DtypeRecorder>();
      set(*net, false);
      set(*reference.master, false);
      fully_shard(net, {.mp_policy = policy}).set_custom_reduce_scatter(recorder);
      {
        torch::NoGradGuard no_grad;
        const auto x = random_batch(9, {4, 16});
        reference.gather();
        EXPECT_SAME(net(x), reference.compute(reference.input(x)));
      }
      set(*net, true);
      set(*reference.master, true);
      train_by_hand(net, reference, {4, 16}, kSquares, 5);
      EXPECT_EQ(recorder->dtypes, std::vector<at::ScalarType>(n > 1 ? 5 : 0, kFp32));
      EXPECT_FALSE(net->order.grad().defined());
    });
  }
}

struct QuantizedImpl : torch::nn::Module {
  QuantizedImpl()
      : codes(register_parameter(
            "codes",
            torch::randn({256, 256}).to(torch::kFloat8_e4m3fn),
            /*requires_grad=*/false)),
        signs(register_parameter(
            "signs", torch::randn({256}).sign().to(torch::kChar), /*requires_grad=*/false)),
        weight(register_parameter("weight", torch::randn({256, 16}).div(16))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    seen = {codes.scalar_type(), signs.scalar_type(), weight.scalar_type()};
    const auto dtype = weight.scalar_type();
    return x.to(dtype).matmul(codes.to(dtype).div(16) * signs.to(dtype)).matmul(weight);
  }
  torch::Tensor codes, signs, weight;
  std::vector<at::ScalarType> seen;
};
FSDP_MODULE(Quantized);

struct IdleImpl : torch::nn::Module {
  IdleImpl()
      : codes(register_parameter(
            "codes",
            torch::randn({256, 256}).to(torch::kFloat8_e4m3fn),
            /*requires_grad=*/false)),
        weight(register_parameter("weight", torch::randn({256, 256}))) {}
  void forward(int) {}
  torch::Tensor codes, weight;
};
FSDP_MODULE(Idle);

TEST(ParamDtypes, FrozenFloat8AndIntegersBesideTrainableOnes) {
  for (const int n : {1, 2, 3}) {
    run_ranks(n, [](int) {
      auto idle = seeded<Idle>();
      fully_shard(idle);
      idle(0);
      // fp8 is floating point, and cast like any other; integers are not.
      for (const auto& [policy, codes, weight] :
           std::vector<std::tuple<MixedPrecisionPolicy, at::ScalarType, at::ScalarType>>{
               {{}, torch::kFloat8_e4m3fn, kFp32},
               {{.param_dtype = kBf16, .reduce_dtype = kFp32}, kBf16, kBf16}}) {
        SCOPED_TRACE_OF(policy);
        auto net = seeded<Quantized>();
        auto reference = by_hand<Quantized>(policy);
        fully_shard(net, {.reshard_after_forward = true, .mp_policy = policy});
        train_by_hand(net, reference, {4, 256}, kSquares, 3);
        EXPECT_EQ(net->seen, (std::vector<at::ScalarType>{codes, torch::kChar, weight}));
      }
    });
  }
}

TEST(ParamDtypes, ComplexParametersKeepTheirDtype) {
  struct PhaseImpl : torch::nn::Module {
    torch::Tensor forward(const torch::Tensor& x) {
      return (torch::view_as_real(phase).sum(-1) * scale * x).sum();
    }
    torch::Tensor phase = register_parameter("phase", torch::ones({6}, torch::kComplexFloat));
    torch::Tensor scale = register_parameter("scale", torch::ones({6}));
  };
  struct Phase : Holder<PhaseImpl> {
    using Holder<PhaseImpl>::Holder;
  };
  run_ranks(2, [](int rank) {
    Phase net(std::make_shared<Hooked<PhaseImpl>>());
    fully_shard(net, {.mp_policy = {.reduce_dtype = torch::kBFloat16}});
    net(torch::full({6}, 1.0 + rank)).backward();
    EXPECT_SAME(net->scale.grad(), torch::full({3}, 1.5f));
    EXPECT_SAME(torch::view_as_real(net->phase.grad()).contiguous(), torch::full({3, 2}, 1.5f));
  });
}

} // namespace
} // namespace fsdp
