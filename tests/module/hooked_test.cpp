// Every form of forward that can be intercepted: the hooks run around it, and it
// means the same as without them.
#include <fsdp/distributed.h>
#include <fsdp/fully_shard.h>
#include <torch/torch.h>

#include "support/tensors.h"

namespace fsdp {
namespace test {

struct Pair {
  torch::Tensor a;
  torch::Tensor b;
  int64_t n = 0;
};

} // namespace test
} // namespace fsdp

FSDP_TREE(fsdp::test::Pair, a, b, n);

namespace fsdp {
namespace {

using test::contains;
using test::message_of;
using test::Pair;
using torch::Tensor;

/// A module with one weight of 4 rows, whole only between the hooks.
struct WeightImpl : torch::nn::Module {
  WeightImpl() : weight(register_parameter("weight", torch::ones({4}))) {}
  Tensor use(const Tensor& x) const {
    EXPECT_EQ(weight.size(0), 4) << "forward ran outside the hooks";
    return x * weight.sum();
  }
  Tensor weight;
};

#define MODULE_WITH(Name, ...)     \
  struct Name##Impl : WeightImpl { \
    using WeightImpl::WeightImpl;  \
    __VA_ARGS__                    \
  };                               \
  FSDP_MODULE(Name)

MODULE_WITH(ByValue, Tensor forward(Tensor x) { return use(x); });
MODULE_WITH(ByConstRef, Tensor forward(const Tensor& x) { return use(x); });
MODULE_WITH(ByMove, Tensor forward(Tensor&& x) { return use(x); });
MODULE_WITH(Const, Tensor forward(Tensor x) const { return use(x); });
MODULE_WITH(Noexcept, Tensor forward(Tensor x) noexcept { return use(x); });
MODULE_WITH(
    Defaults, Tensor forward(Tensor x, double k = 2, Tensor bias = {}) {
      return bias.defined() ? use(x) * k + bias : use(x) * k;
    });
MODULE_WITH(NoArguments, Tensor forward() { return use(torch::ones({1})); });
MODULE_WITH(NoResult, void forward(Tensor x, double& sum) { sum = use(x).sum().item<double>(); });
MODULE_WITH(Number, int64_t forward(Tensor x) { return use(x).sum().item<int64_t>(); });
MODULE_WITH(
    InOut, Tensor forward(Tensor& x) {
      x = x + 1;
      return use(x);
    });
MODULE_WITH(Struct, Pair forward(Pair p) { return {use(p.a), use(p.b), p.n + 1}; });
MODULE_WITH(
    Containers,
    std::tuple<std::vector<Tensor>, std::map<std::string, Tensor>, std::optional<Tensor>> forward(
        std::vector<Tensor> x, std::optional<Tensor> y) {
      return {
          {use(x[0]), use(x[1])}, {{"k", use(x[0])}}, y ? std::optional(use(*y)) : std::nullopt};
    });
MODULE_WITH(
    Overloaded, Tensor forward(Tensor x) { return use(x); } Tensor forward(Tensor x, int64_t k) {
      return use(x) * k;
    });
MODULE_WITH(Template, template <class T> T forward(T x) { return use(x); });
struct ProtectedImpl : WeightImpl {
 protected:
  Tensor forward(Tensor x) {
    return use(x);
  }
};
FSDP_MODULE(Protected);
MODULE_WITH(Recursive, Tensor forward(Tensor x, int64_t depth);
            std::function<Tensor(Tensor, int64_t)> again;);
Tensor RecursiveImpl::forward(Tensor x, int64_t depth) {
  return depth == 0 ? use(x) : again(x, depth - 1);
}

/// Runs `check(module)` on two ranks, with and without sharding.
template <class Holder, class Check>
void on_two_ranks(Check check) {
  run_ranks(2, [&](int) {
    for (const bool sharded : {false, true}) {
      SCOPED_TRACE_OF(sharded);
      Holder module;
      if (sharded) {
        fully_shard(module, {.reshard_after_forward = true});
        EXPECT_EQ(module->weight.size(0), 2);
      }
      check(module);
      EXPECT_EQ(module->weight.size(0), sharded ? 2 : 4); // and resharded
    }
  });
}

const Tensor kOne = torch::ones({1});
const Tensor kFour = torch::full({1}, 4.0);

TEST(Hooked, ArgumentsByValueConstRefAndMove) {
  on_two_ranks<ByValue>([](auto& m) { EXPECT_SAME(m(kOne.clone()), kFour); });
  on_two_ranks<ByConstRef>([](auto& m) { EXPECT_SAME(m->forward(kOne), kFour); });
  on_two_ranks<ByMove>([](auto& m) { EXPECT_SAME(m(kOne.clone()), kFour); });
}

TEST(Hooked, ConstNoexceptAndProtectedForward) {
  on_two_ranks<Const>([](auto& m) { EXPECT_SAME(std::as_const(*m).forward(kOne), kFour); });
  on_two_ranks<Noexcept>([](auto& m) { EXPECT_SAME(m(kOne), kFour); });
  on_two_ranks<Protected>([](auto& m) { EXPECT_SAME(m(kOne), kFour); });
}

TEST(Hooked, DefaultArguments) {
  on_two_ranks<Defaults>([](auto& m) {
    EXPECT_SAME(m(kOne), kFour * 2);
    EXPECT_SAME(m(kOne, 3), kFour * 3);
    EXPECT_SAME(m(kOne, 3, kOne), kFour * 3 + 1);
  });
}

TEST(Hooked, NoArgumentsNoResultAndOtherResults) {
  on_two_ranks<NoArguments>([](auto& m) { EXPECT_SAME(m(), kFour); });
  on_two_ranks<NoResult>([](auto& m) {
    double sum = 0;
    m(kOne, sum);
    EXPECT_EQ(sum, 4);
  });
  on_two_ranks<Number>([](auto& m) { EXPECT_EQ(m(kOne), 4); });
}

TEST(Hooked, AReferenceIsTheModulesToWriteTo) {
  on_two_ranks<InOut>([](auto& m) {
    auto x = kOne.clone();
    EXPECT_SAME(m(x), kFour * 2);
    EXPECT_SAME(x, kOne + 1);
  });
}

TEST(Hooked, StructsAndContainers) {
  on_two_ranks<Struct>([](auto& m) {
    const auto out = m(Pair{kOne, kOne * 2, 5});
    EXPECT_SAME(out.a, kFour);
    EXPECT_SAME(out.b, kFour * 2);
    EXPECT_EQ(out.n, 6);
  });
  on_two_ranks<Containers>([](auto& m) {
    const auto [list, map, maybe] = m(std::vector<Tensor>{kOne, kOne * 2}, std::nullopt);
    EXPECT_SAME(list[1], kFour * 2);
    EXPECT_SAME(map.at("k"), kFour);
    EXPECT_FALSE(maybe);
  });
}

TEST(Hooked, OverloadsAndTemplates) {
  on_two_ranks<Overloaded>([](auto& m) {
    EXPECT_SAME(m(kOne), kFour);
    EXPECT_SAME(m(kOne, 3), kFour * 3);
  });
  on_two_ranks<Template>([](auto& m) { EXPECT_SAME(m(kOne), kFour); });
}

TEST(Hooked, AModuleInsideItselfIsUnshardedOnce) {
  on_two_ranks<Recursive>([](auto& m) {
    auto* raw = m.get();
    m->again = [raw](Tensor x, int64_t depth) { return raw->forward(x, depth); };
    EXPECT_SAME(m(kOne, 3), kFour);
  });
}

TEST(Hooked, WorksInSequentialAndAnyModule) {
  run_ranks(2, [](int) {
    ByValue inner;
    fully_shard(inner);
    torch::nn::Sequential sequence(inner, torch::nn::ReLU());
    EXPECT_SAME(sequence->forward(kOne), kFour);
    torch::nn::AnyModule any(inner);
    EXPECT_SAME(any.forward<Tensor>(kOne.clone()), kFour);
    EXPECT_TRUE(any.get<ByValue>().ptr() == inner.ptr());
  });
}

TEST(Hooked, GradientsOfEveryOutputArriveWhateverIsUsed) {
  run_ranks(2, [](int) {
    for (const bool both : {true, false}) {
      SCOPED_TRACE_OF(both);
      Struct m;
      fully_shard(m, {.reshard_after_forward = true});
      const auto x = torch::ones({1}, torch::requires_grad());
      auto out = m(Pair{x, x * 2, 0});
      out.a.mul_(3); // an in-place edit does not lose the hook
      (both ? out.a + out.b : out.a).sum().backward();
      EXPECT_SAME(m->weight.grad(), torch::full({2}, both ? 5.0 : 3.0));
      EXPECT_SAME(x.grad(), torch::full({1}, both ? 20.0 : 12.0));
      EXPECT_EQ(m->weight.size(0), 2);
    }
  });
}

TEST(Hooked, CopiesAndClonesAreHookedButNotSharded) {
  ByValue module;
  const auto copy = std::dynamic_pointer_cast<Hooked<ByValueImpl>>(
      std::make_shared<Hooked<ByValueImpl>>(static_cast<const ByValueImpl&>(*module)));
  EXPECT_FALSE(is_fsdp_module(copy));
  std::ostringstream text;
  text << *module;
  EXPECT_FALSE(contains(text.str(), "Hooked"));
}

TEST(Tree, FindsTensorsInNestedTypes) {
  using Nested = std::pair<
      std::variant<int64_t, Tensor>,
      std::unordered_map<std::string, std::array<std::optional<Tensor>, 2>>>;
  static_assert(HasTree<Nested> && HasTree<torch::OrderedDict<std::string, Tensor>>);
  static_assert(!HasTree<std::vector<int64_t>> && tensor_free<std::vector<int64_t>>);
  Nested value{kOne, {{"k", {kOne, std::nullopt}}}};
  int found = 0;
  visit_tensors(value, [&](Tensor& tensor) {
    ++found;
    tensor = kFour;
  });
  EXPECT_EQ(found, 2);
  EXPECT_SAME(std::get<Tensor>(value.first), kFour);
}

} // namespace
} // namespace fsdp
