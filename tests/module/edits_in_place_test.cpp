// Inputs and outputs of sharded modules that somebody edits in place.
#include "module/lambda.h"

namespace fsdp {
namespace {

using namespace test;

TEST(EditsInPlace, AnInputEditedInPlaceThrows) {
  for (const int n : {1, 2}) {
    run_ranks(n, [](int) {
      auto net = seeded<Lambda>(
          [](Linear& lin, torch::Tensor x) { return std::vector{lin(torch::relu_(x))}; });
      fully_shard(net);
      EXPECT_TRUE(contains(
          message_of<c10::Error>([&] { net(lambda_input() * 1); }), "is being modified inplace"));
    });
  }
}

TEST(EditsInPlace, OutputsMayBeEditedInPlace) {
  run_ranks(2, [](int) {
    const auto views = [](Linear& lin, const torch::Tensor& x) {
      const auto h = lin(x);
      return std::vector{h, h.view(-1)};
    };
    const auto one_view = [](Linear& lin, const torch::Tensor& x) {
      return std::vector{lin(x).view({-1}), lin(x)};
    };
    for (const LambdaImpl::Body& body : {LambdaImpl::Body(views), LambdaImpl::Body(one_view)}) {
      for (const size_t edited : {0, 1}) {
        SCOPED_TRACE_OF(edited);
        auto [net, reference] = twins<Lambda>(body);
        fully_shard(net);
        const auto run = [&](Lambda& each) {
          auto outputs = each(lambda_input());
          outputs[edited].mul_(3);
          (outputs[0].pow(2).sum() + outputs[1].sum()).backward();
        };
        run(net);
        run(reference);
        average_gradients(*reference);
        expect_parity(*net, *reference);
      }
    }
  });
}

TEST(EditsInPlace, AnInputThatComesBackIsNotForEditing) {
  run_ranks(2, [](int) {
    auto net = seeded<Lambda>([](Linear& lin, torch::Tensor x) { return std::vector{lin(x), x}; });
    fully_shard(net);
    auto outputs = net(lambda_input() * 1);
    EXPECT_THROW(outputs[1].mul_(3), c10::Error);
  });
}

} // namespace
} // namespace fsdp
