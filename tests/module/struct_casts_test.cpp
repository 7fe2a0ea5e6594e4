// Casts of tensors inside of the structs and containers that modules take and return.
#include "module/by_hand.h"

namespace fsdp {
namespace {

using namespace test;
using Dtypes = std::vector<at::ScalarType>;

struct Single {
  torch::Tensor x;
};
struct Fields {
  torch::Tensor a;
  int tag;
  torch::Tensor b;
};
struct Nested {
  Fields fields;
  torch::Tensor index;
  std::optional<torch::Tensor> c;
};

} // namespace
} // namespace fsdp

FSDP_TREE(fsdp::Single, x);
FSDP_TREE(fsdp::Fields, a, tag, b);
FSDP_TREE(fsdp::Nested, fields, index, c);

namespace fsdp {
namespace {

template <class C>
Dtypes dtypes_in(C container) {
  Dtypes dtypes;
  visit_tensors(container, [&](torch::Tensor& tensor) { dtypes.push_back(tensor.scalar_type()); });
  return dtypes;
}

/// Makes of a tensor as many as `like` has.
template <class C>
struct ToContainerImpl : torch::nn::Module {
  explicit ToContainerImpl(C like) : like(std::move(like)) {}
  C forward(const torch::Tensor& x) {
    seen = {x.scalar_type()};
    C made = like;
    double scale = 1;
    visit_tensors(made, [&](torch::Tensor& tensor) {
      tensor = tensor.is_floating_point() ? x * (scale /= 2) : tensor;
    });
    return made;
  }
  C like;
  Dtypes seen;
};

/// A linear for each.
template <class C>
struct PerFieldImpl : torch::nn::Module {
  explicit PerFieldImpl(const C& like) {
    for (const auto dtype : dtypes_in(like)) {
      if (at::isFloatingType(dtype)) {
        linears.push_back(register_module(std::to_string(linears.size()), linear(16, 16)));
      }
    }
  }
  C forward(C container) {
    seen = dtypes_in(container);
    size_t i = 0;
    visit_tensors(container, [&](torch::Tensor& tensor) {
      tensor = tensor.is_floating_point() ? torch::tanh(linears.at(i++)(tensor)) : tensor;
    });
    return container;
  }
  std::vector<Linear> linears;
  Dtypes seen;
};

template <class C>
struct FromContainerImpl : torch::nn::Module {
  torch::Tensor forward(C container) {
    torch::Tensor sum;
    visit_tensors(container, [&](torch::Tensor& tensor) {
      if (tensor.is_floating_point()) {
        sum = sum.defined() ? sum + tensor : tensor;
      }
    });
    return sum;
  }
};

template <class C>
struct StructuredImpl : torch::nn::Module {
  explicit StructuredImpl(const C& like)
      : to(register_module("0", Holder<ToContainerImpl<C>>(like))),
        first(register_module("1", Holder<PerFieldImpl<C>>(like))),
        second(register_module("2", Holder<PerFieldImpl<C>>(like))),
        from(register_module("3", Holder<FromContainerImpl<C>>())) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return from(second(first(to(x))));
  }
  Holder<ToContainerImpl<C>> to;
  Holder<PerFieldImpl<C>> first, second;
  Holder<FromContainerImpl<C>> from;
};

TEST(Casts, InsideOfStructsAndContainers) {
  const auto train = []<class C>(const C& like) {
    for (const MixedPrecisionPolicy& policy :
         {MixedPrecisionPolicy{}, MixedPrecisionPolicy{.param_dtype = kBf16, .reduce_dtype = kBf16},
          MixedPrecisionPolicy{.param_dtype = kBf16, .reduce_dtype = kFp32},
          MixedPrecisionPolicy{kBf16, kBf16, kBf16, true}}) {
      run_ranks(2, [&](int) {
        SCOPED_TRACE_OF(policy);
        auto net = seeded<Holder<StructuredImpl<C>>>(like);
        auto reference = by_hand<Holder<StructuredImpl<C>>>(policy, like);
        const FullyShardOptions options{.mp_policy = policy};
        fully_shard(net->to, options);
        fully_shard(net->first, options);
        fully_shard(net->second, options);
        fully_shard(net->from, options);
        fully_shard(net, options);
        train_by_hand(net, reference, {2, 16}, kSquares);
        auto expected = dtypes_in(like);
        for (auto& dtype : expected) {
          dtype = at::isFloatingType(dtype) ? policy.param_dtype.value_or(kFp32) : dtype;
        }
        EXPECT_EQ(net->to->seen, (Dtypes{policy.param_dtype.value_or(kFp32)}));
        EXPECT_EQ(net->first->seen, expected);
        EXPECT_EQ(net->second->seen, expected);
      });
    }
  };
  const auto x = torch::zeros({1});
  const auto index = torch::arange(300, 303);
  train(Single{x});
  train(Fields{x, 7, x});
  train(Nested{{x, 7, x}, index, x});
  train(std::tuple(x, 7, std::pair(index, x)));
  train(std::map<std::string, torch::Tensor>{{"a", x}, {"b", x}, {"index", index}});
  train(std::vector<Single>{{x}, {x}});
}

TEST(Casts, OfAStructAsTheOnlyInput) {
  run_ranks(2, [](int) {
    const Fields like{torch::zeros({1}), 7, torch::zeros({1})};
    const MixedPrecisionPolicy policy{.param_dtype = kBf16, .output_dtype = kFp32};
    auto net = seeded<Holder<PerFieldImpl<Fields>>>(like);
    auto reference = by_hand<Holder<PerFieldImpl<Fields>>>(policy, like);
    fully_shard(net, {.mp_policy = policy});
    const auto loss_of = [](auto& each, const torch::Tensor& x) {
      const auto out = each(Fields{x, 7, x * 2});
      EXPECT_EQ(out.tag, 7);
      return (out.a.to(kFp32) * out.b.to(kFp32)).sum();
    };
    train_by_hand(net, reference, {2, 16}, loss_of, 3);
    const auto out = net(Fields{random_batch(0, {2, 16}), 7, random_batch(1, {2, 16})});
    EXPECT_EQ(net->seen, (Dtypes{kBf16, kBf16}));
    EXPECT_EQ(dtypes_in(out), (Dtypes{kFp32, kFp32}));
  });
}

} // namespace
} // namespace fsdp
