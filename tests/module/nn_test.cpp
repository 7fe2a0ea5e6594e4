// What fsdp::nn adds to torch's modules, and how they behave as children.
#include "module/nn_cases.h"

namespace fsdp {
namespace {

using namespace test;
using LstmResult = std::tuple<Tensor, std::tuple<Tensor, Tensor>>;

TEST(Nn, Sequential) {
  // torch's own has no operator().
  expect_all_like_torch({
      CASE(Sequential, (ns::Linear(3, 4), ns::ReLU(), ns::Linear(4, 2)), ->forward(in({2, 3}))),
      CASE(
          Sequential,
          ({{"first", ns::Linear(3, 4)}, {"second", ns::BatchNorm1d(4)}}), ->forward(in({2, 3}))),
      CASE(Sequential, (torch::nn::Linear(3, 4)), ->forward(in({2, 3}))),
      CASE(Sequential, (std::make_shared<torch::nn::LinearImpl>(3, 4)), ->forward(in({2, 3}))),
      CASE(
          Sequential,
          (ns::Linear(3, 4), ns::LSTM(4, 2)), ->template forward<LstmResult>(in({5, 2, 3}))),
  });
}

// ------------------------------------------------------------ RMSNorm

namespace plain {
TORCH_MODULE_IMPL(RMSNorm, fsdp::nn::RMSNormImpl);
} // namespace plain

#define RMS_CASE(MAKE)                                              \
  Case {                                                            \
    "RMSNorm", [] { return subject(plain::RMSNorm MAKE, Call()); }, \
        [] { return subject(nn::RMSNorm MAKE, Call()); }            \
  }

TEST(Nn, RMSNorm) {
  using Call = decltype([](auto& m) { return m(in({3, 4})); });
  expect_all_like_torch({
      RMS_CASE((4)),
      RMS_CASE((std::vector<int64_t>{3, 4})),
      RMS_CASE((nn::RMSNormOptions(4).elementwise_affine(false))),
  });

  const auto x = torch::randn({3, 4}) * 1e-3;
  const auto by_hand = [&](double eps) { return x * (x.pow(2).mean(1, true) + eps).rsqrt(); };
  EXPECT_CLOSE(nn::RMSNorm(4)(x), by_hand(std::numeric_limits<float>::epsilon()));
  nn::RMSNorm norm(nn::RMSNormOptions(4).eps(1e-2));
  norm->weight.detach().fill_(3);
  EXPECT_CLOSE(norm(x), by_hand(1e-2) * 3);
  EXPECT_EQ(printed(norm.ptr()), "fsdp::nn::RMSNorm([4], eps=0.01, elementwise_affine=true)");
}

// ------------------------------------------------------------ Where torch's own go

TEST(Nn, TakesThePlaceOfTorchs) {
  namespace nn = fsdp::nn;
  struct NetImpl : torch::nn::Module {
    NetImpl() : linear(register_module("linear", nn::Linear(3, 4))) {
      late = register_module("late", nn::Linear(4, 4));
      list->push_back(nn::Linear(4, 4));
      register_module("list", list);
    }
    Tensor forward(Tensor x) {
      return list[0]->as<nn::Linear>()->forward(late(linear(x)));
    }
    nn::Linear linear;
    nn::Linear late{nullptr};
    nn::ModuleList list; // torch's own
  };
  Holder<NetImpl> net;
  EXPECT_EQ(net(torch::ones({2, 3})).size(1), 4);
  EXPECT_EQ(net->parameters().size(), 6);

  torch::nn::Sequential theirs(nn::Linear(3, 4), torch::nn::ReLU());
  theirs->push_back(nn::Linear(4, 2));
  theirs->push_back("named", nn::Tanh());
  EXPECT_EQ(theirs->forward(torch::ones({2, 3})).size(1), 2);
  EXPECT_EQ(theirs->at<nn::Linear::Impl>(2).options.out_features(), 2);
  nn::Sequential ours;
  ours->extend(*theirs);
  ours->push_back(std::make_shared<nn::Linear::Impl>(2, 1));
  EXPECT_EQ(ours->size(), 5);
  EXPECT_EQ(ours(torch::ones({2, 3})).size(1), 1);

  torch::nn::AnyModule any(nn::MultiheadAttention(6, 2)); // with default arguments
  const auto x = torch::ones({4, 2, 6});
  EXPECT_SAME(
      std::get<0>(any.forward<std::tuple<Tensor, Tensor>>(x, x, x)).sum().isfinite(),
      torch::tensor(true));
  any = nn::LSTM(3, 5).ptr();
  EXPECT_EQ((std::get<0>(any.forward<LstmResult>(torch::ones({4, 2, 3}))).size(2)), 5);
  any = nn::ConvTranspose2d(1, 1, 2).ptr();
  EXPECT_EQ(any.forward(torch::ones({1, 1, 2, 2})).size(2), 3);
  EXPECT_TRUE(any.get<nn::ConvTranspose2d>().ptr() == any.ptr());

  nn::LSTM lstm = nullptr;
  EXPECT_THROW(lstm(torch::ones({1, 1, 1})), c10::Error);
}

TEST(Nn, EmbeddingsFromPretrained) {
  const auto table = torch::randn({7, 3});
  auto embedding = nn::Embedding::from_pretrained(table);
  EXPECT_SAME(embedding(torch::tensor({2})), table.narrow(0, 2, 1));
  EXPECT_FALSE(embedding->weight.requires_grad());
  auto bag = nn::EmbeddingBag::from_pretrained(
      table, nn::EmbeddingBagFromPretrainedOptions().freeze(false).mode(torch::kSum));
  EXPECT_SAME(bag(torch::tensor({{2}})), table.narrow(0, 2, 1));
  EXPECT_TRUE(bag->weight.requires_grad());
}

TEST(Nn, AContainerWithoutForwardIsRefused) {
  run_ranks(2, [](int) {
    nn::ModuleList list(nn::Linear(3, 4));
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { fully_shard(list); }),
        "does not support containers that do not implement forward"));
  });
}

TEST(Nn, ShardedChildrenOfASequential) {
  run_ranks(3, [](int rank) {
    const auto make = [] {
      std::lock_guard lock(generator);
      torch::manual_seed(7);
      return nn::Sequential(nn::Linear(3, 4), nn::GELU(), nn::Linear(4, 2));
    };
    auto net = make();
    auto whole = make();
    for (const auto& child : *net) {
      fully_shard(child.ptr());
    }
    fully_shard(net);
    const auto x = torch::randn({5, 3}, at::make_generator<at::CPUGeneratorImpl>(1));
    const auto loss = net(x).sum();
    EXPECT_SAME(loss, whole(x).sum());
    loss.backward();
    whole(x).sum().backward();
    for (const auto& item : whole->named_parameters()) {
      EXPECT_CLOSE(net->named_parameters()[item.key()].grad(), shard(item.value().grad()));
    }
    EXPECT_EQ(is_fsdp_module(net->ptr(1)), true) << rank; // a GELU: no parameters
  });
}

/// flatten_parameters and a copy of the parameters inside: nothing to lose.
TEST(Nn, AShardedLstmKeepsItsFlatWeights) {
  run_ranks(2, [](int) {
    nn::LSTM lstm(3, 4);
    for (auto& param : lstm->parameters()) {
      param.detach().fill_(0.5);
    }
    fully_shard(lstm);
    auto whole = torch::nn::LSTM(3, 4);
    for (auto& param : whole->parameters()) {
      param.detach().fill_(0.5);
    }
    torch::optim::SGD sharded_optimizer(lstm->parameters(), 0.1);
    torch::optim::SGD optimizer(whole->parameters(), 0.1);
    const auto x = torch::ones({2, 1, 3});
    for (int step = 0; step < 3; ++step) {
      lstm->flatten_parameters();
      EXPECT_EQ(lstm->all_weights()[0].size(0), 8);
      const auto out = std::get<0>(lstm(x));
      EXPECT_CLOSE(out, std::get<0>(whole(x)));
      out.sum().backward();
      std::get<0>(whole(x)).sum().backward();
      sharded_optimizer.step();
      optimizer.step();
      sharded_optimizer.zero_grad();
      optimizer.zero_grad();
    }
  });
}

TEST(Nn, TreeOfWhatTheyReturn) {
  torch::nn::ASMoutput output(torch::ones({1}), 2.0);
  visit_tensors(output, [](Tensor& tensor) { tensor = tensor + 1; });
  EXPECT_SAME(output.output, torch::full({1}, 2.0));
  auto packed = torch::nn::utils::rnn::pack_sequence({torch::ones({3, 1}), torch::ones({2, 1})});
  visit_tensors(packed, [](Tensor& tensor) { tensor = tensor + 1; });
  EXPECT_SAME(packed.data(), torch::full({5, 1}, 2.0));
}

// LibTorch's adds the bias to a product that was rounded already.
TEST(Nn, LinearRoundsOnceAsPythonsDoes) {
  nn::Linear net(64, 32);
  net->to(torch::kBFloat16);
  const auto x = torch::randn({4, 8, 64}).to(torch::kBFloat16);
  EXPECT_SAME(net(x), torch::linear(x, net->weight, net->bias));
}

} // namespace
} // namespace fsdp
