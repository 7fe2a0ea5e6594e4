// Norms, in low precision or kept out of it, and buffers, which nobody casts.
#include <fsdp/nn.h>

#include "module/by_hand.h"

namespace fsdp {
namespace {

using namespace test;

void cast_buffers(torch::nn::Module& module, at::ScalarType dtype) {
  for (const auto& buffer : module.buffers()) {
    if (buffer.is_floating_point()) {
      buffer.set_data(buffer.to(dtype));
    }
  }
}

struct NormCase {
  std::function<nn::Sequential()> make;
  std::vector<int64_t> sizes;
  bool cast_buffers = false;
  std::optional<MixedPrecisionPolicy> norm = {}; // of the norm alone
};

/// Every child a group, and the rest.
void shard_children(
    nn::Sequential& net, const MixedPrecisionPolicy& policy, const MixedPrecisionPolicy& norm) {
  for (size_t i = 0; i < net->size(); ++i) {
    fully_shard((*net)[i], {.mp_policy = i == 1 ? norm : policy});
  }
  fully_shard(net, {.mp_policy = policy});
}

template <class Make>
auto seeded_by(const Make& make) {
  std::lock_guard lock(default_generator_mutex);
  torch::manual_seed(42);
  auto net = make();
  to_test_device(*net);
  return net;
}

nn::Sequential conv_norm_conv() {
  return nn::Sequential(
      nn::Conv2d(torch::nn::Conv2dOptions(1, 5, 3)), nn::BatchNorm2d(5),
      nn::Conv2d(torch::nn::Conv2dOptions(5, 4, 3)));
}
nn::Sequential linear_norm_linear() {
  return nn::Sequential(nn::Linear(16, 16), nn::BatchNorm1d(16), nn::Linear(16, 16));
}

TEST(Norms, InLowPrecision) {
  run_ranks(2, [](int) {
    for (const auto dtype : {kBf16, kFp16}) {
      const std::vector<NormCase> cases{
          {[] {
             return nn::Sequential(
                 nn::Linear(16, 16), nn::LayerNorm(torch::nn::LayerNormOptions({16})),
                 nn::Linear(16, 16));
           },
           {4, 16}},
          {linear_norm_linear, {4, 16}, true},
          {conv_norm_conv, {3, 1, 9, 9}, true},
          // Kept in fp32, and with its buffers untouched.
          {conv_norm_conv, {3, 1, 9, 9}, false, MixedPrecisionPolicy{.output_dtype = dtype}},
          {linear_norm_linear, {4, 16}, false, MixedPrecisionPolicy{.output_dtype = dtype}},
      };
      for (size_t i = 0; i < cases.size(); ++i) {
        SCOPED_TRACE_OF(dtype, i);
        const auto& each = cases[i];
        const MixedPrecisionPolicy policy{.param_dtype = dtype};
        auto net = seeded_by(each.make);
        ByHand<nn::Sequential> reference(seeded_by(each.make), seeded_by(each.make), policy);
        reference.policy_of = [&](const std::string& param) {
          return each.norm && param.starts_with("1.") ? *each.norm : policy;
        };
        if (each.cast_buffers) {
          cast_buffers(*net, dtype);
          cast_buffers(*reference.compute, dtype);
        }
        shard_children(net, policy, each.norm.value_or(policy));
        train_by_hand(
            net, reference, each.sizes,
            [&](nn::Sequential& one, const torch::Tensor& x) {
              const auto y = one(x);
              EXPECT_EQ(y.scalar_type(), dtype);
              return y.pow(2).mean();
            },
            3);
        const auto expected = reference.compute->named_buffers();
        EXPECT_EQ(net->named_buffers().keys(), expected.keys());
        for (const auto& item : net->named_buffers()) {
          EXPECT_SAME(item.value(), expected[item.key()]); // updated, and in the same dtype
        }
      }
    }
  });
}

// A batch norm in bf16 with running statistics in fp32 is torch's error, not ours
// to paper over.
TEST(Norms, BuffersAreNotCastForThem) {
  run_ranks(2, [](int) {
    for (const auto& make : {conv_norm_conv, linear_norm_linear}) {
      SCOPED_TRACE(make == conv_norm_conv ? "convolutions" : "linear layers");
      auto net = seeded_by(make);
      const MixedPrecisionPolicy policy{.param_dtype = kBf16};
      shard_children(net, policy, policy);
      const auto x =
          make == conv_norm_conv ? random_batch(0, {3, 1, 9, 9}) : random_batch(0, {4, 16});
      EXPECT_THROW(net(x), c10::Error);
      for (const auto& buffer : net->buffers()) {
        EXPECT_TRUE(!buffer.is_floating_point() || buffer.scalar_type() == kFp32);
      }
      cast_buffers(*net, kBf16);
      net(x).sum().backward();
    }
  });
}

TEST(Buffers, AreLeftAlone) {
  for (const int n : {1, 2}) {
    run_ranks(n, [](int) {
      const MixedPrecisionPolicy policy{.param_dtype = kBf16, .reduce_dtype = kFp32};
      auto net = seeded<MLP>(16, true, /*with_buffer=*/true);
      auto reference = by_hand<MLP>(policy, 16, true, /*with_buffer=*/true);
      const auto buffer = net->buffer;
      const auto* data = buffer.const_data_ptr();
      fully_shard(net, {.mp_policy = policy});
      train_by_hand(net, reference, {4, 16}, kSquares, 3);
      EXPECT_EQ(net(random_batch(0, {4, 16})).scalar_type(), kFp32); // bf16 and a float buffer
      EXPECT_TRUE(net->buffer.is_same(buffer) && net->buffer.const_data_ptr() == data);
      EXPECT_SAME(net->buffer, reference.master->buffer);
    });
  }
}

// Norms in fp32 between linears in bf16: what they are given is cast up, what they
// return down.
TEST(Norms, KeptInFp32) {
  struct NormedImpl : torch::nn::Module {
    NormedImpl()
        : in(register_module("in", linear(16, 16))),
          norm(register_module("norm", layer_norm(16))),
          out(register_module("out", linear(16, 16))) {}
    torch::Tensor forward(const torch::Tensor& x) {
      return out(border.leave(norm(border.enter(in(x)))));
    }
    Linear in;
    LayerNorm norm;
    Linear out;
    Border border; // of the norm
  };
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [](int) {
      const MixedPrecisionPolicy policy{.param_dtype = kBf16, .reduce_dtype = kFp32};
      for (const MixedPrecisionPolicy& norm :
           {MixedPrecisionPolicy{},
            MixedPrecisionPolicy{.param_dtype = kFp32, .output_dtype = kBf16}}) {
        for (const bool reshard : {true, false}) {
          SCOPED_TRACE_OF(norm, reshard);
          struct Normed : Holder<NormedImpl> {
            Normed() : Holder<NormedImpl>(std::make_shared<Hooked<NormedImpl>>()) {}
          };
          auto net = seeded<Normed>();
          auto reference = by_hand<Normed>(policy);
          reference.policy_of = [&](const std::string& param) {
            return param.starts_with("norm") ? norm : policy;
          };
          reference.compute->border = {norm};
          fully_shard(net->norm, {.reshard_after_forward = reshard, .mp_policy = norm});
          fully_shard(net, {.reshard_after_forward = reshard, .mp_policy = policy});
          train_by_hand(net, reference, {4, 16}, kSquares);
        }
      }
    });
  }
}

} // namespace
} // namespace fsdp
