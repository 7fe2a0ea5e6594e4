// Every built-in of fsdp::nn: bit for bit torch's own, and the same again when it
// is sharded.
#include <ATen/CPUGeneratorImpl.h>
#include <fsdp/distributed.h>
#include <fsdp/fully_shard.h>
#include <fsdp/nn.h>
#include <torch/torch.h>

#include <mutex>

#include "support/tensors.h"

namespace fsdp {
namespace {

using test::contains;
using test::message_of;
using torch::Tensor;
using LstmResult = std::tuple<Tensor, std::tuple<Tensor, Tensor>>;

// ------------------------------------------------------------ Inputs of a call

thread_local at::Generator inputs; // torch's default one is shared by the ranks
thread_local std::vector<Tensor> leaves;

/// A random input that gets a gradient.
Tensor in(at::IntArrayRef sizes) {
  leaves.push_back(torch::randn(sizes, inputs).set_requires_grad(true));
  return leaves.back();
}
/// Random indices below `n`.
Tensor ids(int64_t n, at::IntArrayRef sizes) {
  return torch::randint(n, sizes, inputs, torch::kLong);
}
/// Random numbers, each 1 or -1.
Tensor signs(at::IntArrayRef sizes) {
  return torch::randn(sizes, inputs).sign();
}
Tensor causal(int64_t n) {
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
Subject subject(const Holder& holder, Call) {
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

std::mutex generator;

Subject seeded(Subject (*make)()) {
  std::lock_guard lock(generator);
  torch::manual_seed(7);
  return make();
}

struct Results {
  std::vector<Tensor> outputs;
  std::vector<Tensor> input_grads;
};

/// Forward and backward with the inputs of `seed`.
Results step(const Module& module, std::vector<Tensor> (*run)(const Module&), int seed) {
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

testing::AssertionResult same(const Tensor& actual, const Tensor& expected) {
  if (!actual.defined() || !expected.defined()) {
    return actual.defined() == expected.defined()
               ? testing::AssertionSuccess()
               : testing::AssertionFailure() << "only one is defined";
  }
  return test::same(actual, expected);
}

void expect_same(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(same(actual[i], expected[i])) << i;
  }
}
void expect_same(const Results& actual, const Results& expected) {
  expect_same(actual.outputs, expected.outputs);
  expect_same(actual.input_grads, expected.input_grads);
}

std::string printed(const Module& module) {
  std::ostringstream out;
  out << *module;
  return out.str();
}

void expect_like_torch(const Case& c) {
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
      EXPECT_TRUE(same(param, item.value())) << item.key();
      EXPECT_TRUE(same(param.grad(), item.value().grad())) << "gradient of " << item.key();
    }
    EXPECT_EQ(mine->named_buffers().keys(), torchs->named_buffers().keys());
    expect_same(mine->buffers(), torchs->buffers());
  }
}

/// This rank's rows of a parameter or gradient.
Tensor shard(const Tensor& whole) {
  const auto rows = (whole.size(0) + get_world_size() - 1) / get_world_size();
  const auto start = std::min<int64_t>(whole.size(0), rows * get_rank());
  return whole.narrow(0, start, std::min(rows, whole.size(0) - start));
}

/// Two steps and an evaluation on each of `n` ranks, each with inputs of its own.
void expect_like_torch_sharded(const Case& c, int n) {
  run_ranks(n, [&](int rank) {
    SCOPED_TRACE(std::string(c.name) + " on " + std::to_string(n) + " ranks");
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
        EXPECT_TRUE(same(
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
void expect_all_like_torch(const std::vector<Case>& cases) {
  for (const auto& c : cases) {
    expect_like_torch(c);
    if (!c.ours().module->parameters().empty()) {
      expect_like_torch_sharded(c, 2);
      expect_like_torch_sharded(c, 3);
    }
  }
}

// ------------------------------------------------------------ The table

TEST(Nn, Linears) {
  expect_all_like_torch({
      CASE(Linear, (3, 4), (in({2, 3}))),
      CASE(Linear, (torch::nn::LinearOptions(3, 4).bias(false)), (in({5, 2, 3}))),
      CASE(Bilinear, (3, 4, 5), (in({2, 3}), in({2, 4}))),
      CASE(Identity, (), (in({2, 3}))),
      CASE(Flatten, (), (in({2, 3, 4}))),
      CASE(Flatten, (torch::nn::FlattenOptions().start_dim(0)), (in({2, 3, 4}))),
      CASE(Unflatten, (1, std::vector<int64_t>{2, 2}), (in({3, 4}))),
      CASE(Functional, ([](Tensor x) { return x * 2; }), (in({2, 3}))),
      CASE(Functional, (torch::elu, 1, 0, 1), (in({2, 3}))),
      CASE(Fold, (torch::nn::FoldOptions({3, 2}, {2, 2})), (in({1, 12, 2}))),
      CASE(Unfold, (2), (in({1, 2, 4, 4}))),
      CASE(
          Upsample, (torch::nn::UpsampleOptions().scale_factor(std::vector<double>({2}))),
          (in({1, 2, 3}))),
      CASE(PixelShuffle, (2), (in({1, 4, 3, 3}))),
      CASE(PixelUnshuffle, (2), (in({1, 1, 4, 4}))),
      CASE(CosineSimilarity, (), (in({3, 4}), in({3, 4}))),
      CASE(PairwiseDistance, (), (in({3, 4}), in({3, 4}))),
  });
}

TEST(Nn, Embeddings) {
  expect_all_like_torch({
      CASE(Embedding, (7, 3), (ids(7, {2, 5}))),
      CASE(Embedding, (torch::nn::EmbeddingOptions(7, 3).padding_idx(2)), (ids(7, {2, 5}))),
      CASE(EmbeddingBag, (7, 3), (ids(7, {2, 5}))),
      CASE(
          EmbeddingBag, (torch::nn::EmbeddingBagOptions(7, 3).mode(torch::kSum)),
          (ids(7, {2, 5}), Tensor(), in({2, 5}))),
      CASE(
          EmbeddingBag, (torch::nn::EmbeddingBagOptions(7, 3).mode(torch::kSum)),
          (ids(7, {6}), torch::tensor({0, 2}))),
  });
}

TEST(Nn, Norms) {
  expect_all_like_torch({
      CASE(LayerNorm, (std::vector<int64_t>{4}), (in({3, 4}))),
      CASE(
          LayerNorm, (torch::nn::LayerNormOptions({3, 4}).elementwise_affine(false)),
          (in({2, 3, 4}))),
      CASE(GroupNorm, (2, 6), (in({2, 6, 3}))),
      CASE(LocalResponseNorm, (2), (in({2, 4, 3}))),
      CASE(CrossMapLRN2d, (3), (in({2, 4, 3, 3}))),
      CASE(BatchNorm1d, (5), (in({4, 5}))),
      CASE(BatchNorm2d, (5), (in({4, 5, 2, 2}))),
      CASE(
          BatchNorm2d, (torch::nn::BatchNormOptions(5).momentum(std::nullopt)), (in({4, 5, 2, 2}))),
      CASE(BatchNorm3d, (torch::nn::BatchNormOptions(5).affine(false)), (in({4, 5, 2, 2, 2}))),
      CASE(InstanceNorm1d, (5), (in({4, 5, 3}))),
      CASE(InstanceNorm2d, (torch::nn::InstanceNormOptions(5).affine(true)), (in({4, 5, 2, 2}))),
      CASE(
          InstanceNorm3d, (torch::nn::InstanceNormOptions(5).track_running_stats(true)),
          (in({4, 5, 2, 2, 2}))),
  });
}

TEST(Nn, Dropouts) {
  expect_all_like_torch({
      CASE(Dropout, (), (in({9, 4}))),
      CASE(Dropout, (0.3), (in({9, 4}))),
      CASE(Dropout, (torch::nn::DropoutOptions().p(0.3).inplace(true)), (in({9, 4}) * 2)),
      CASE(Dropout2d, (0.3), (in({2, 9, 2, 2}))),
      CASE(Dropout3d, (0.3), (in({2, 9, 2, 2, 2}))),
      CASE(AlphaDropout, (0.3), (in({9, 4}))),
      CASE(FeatureAlphaDropout, (0.3), (in({9, 4, 2}))),
  });
}

TEST(Nn, Convolutions) {
  expect_all_like_torch({
      CASE(Conv1d, (4, 6, 3), (in({2, 4, 7}))),
      CASE(Conv2d, (4, 6, 3), (in({2, 4, 5, 5}))),
      CASE(
          Conv2d,
          (torch::nn::Conv2dOptions(4, 6, {3, 2})
               .groups(2)
               .padding(1)
               .padding_mode(torch::kCircular)
               .bias(false)),
          (in({2, 4, 5, 5}))),
      CASE(Conv3d, (2, 5, 2), (in({1, 2, 4, 4, 4}))),
      CASE(ConvTranspose1d, (4, 6, 3), (in({2, 4, 5}))),
      CASE(ConvTranspose2d, (4, 6, 3), (in({2, 4, 5, 5}))),
      CASE(
          ConvTranspose2d, (torch::nn::ConvTranspose2dOptions(4, 6, 3).stride(2)),
          (in({2, 4, 3, 3}), std::vector<int64_t>{8, 8})),
      CASE(ConvTranspose3d, (2, 5, 2), (in({1, 2, 3, 3, 3}))),
  });
}

TEST(Nn, Recurrent) {
  expect_all_like_torch({
      CASE(RNN, (3, 5), (in({4, 2, 3}))),
      CASE(
          RNN, (torch::nn::RNNOptions(3, 5).num_layers(2).nonlinearity(torch::kReLU)),
          (in({4, 2, 3}), in({2, 2, 5}))),
      CASE(LSTM, (3, 5), (in({4, 2, 3}))),
      CASE(
          LSTM, (torch::nn::LSTMOptions(3, 5).num_layers(2).bidirectional(true)),
          (in({4, 2, 3}), std::make_tuple(in({4, 2, 5}), in({4, 2, 5})))),
      CASE(
          LSTM, (torch::nn::LSTMOptions(3, 5).proj_size(2).batch_first(true).bias(false)),
          (in({4, 2, 3}))),
      CASE(GRU, (3, 5), (in({4, 2, 3}))),
      CASE(GRU, (torch::nn::GRUOptions(3, 5).num_layers(2)), (in({4, 2, 3}), in({2, 2, 5}))),
      CASE(RNNCell, (3, 5), (in({2, 3}))),
      CASE(LSTMCell, (3, 5), (in({2, 3}))),
      CASE(LSTMCell, (3, 5), (in({2, 3}), std::make_tuple(in({2, 5}), in({2, 5})))),
      CASE(GRUCell, (3, 5), (in({2, 3}), in({2, 5}))),
  });
}

TEST(Nn, Transformers) {
  using namespace torch::nn;
  expect_all_like_torch({
      CASE(MultiheadAttention, (6, 2), (in({4, 2, 6}), in({5, 2, 6}), in({5, 2, 6}))),
      CASE(
          MultiheadAttention, (MultiheadAttentionOptions(6, 2).kdim(3).vdim(3).add_bias_kv(true)),
          (in({4, 2, 6}), in({4, 2, 3}), in({4, 2, 3}), Tensor(), false, causal(4))),
      CASE(
          TransformerEncoderLayer,
          (TransformerEncoderLayerOptions(6, 2).dim_feedforward(5).dropout(0.0)), (in({4, 2, 6}))),
      CASE(
          TransformerEncoderLayer,
          (TransformerEncoderLayerOptions(6, 2).dim_feedforward(5).dropout(0.0).activation(
              torch::kGELU)),
          (in({4, 2, 6}), causal(4))),
      CASE(
          TransformerDecoderLayer,
          (TransformerDecoderLayerOptions(6, 2).dim_feedforward(5).dropout(0.0)),
          (in({4, 2, 6}), in({5, 2, 6}), causal(4))),
      CASE(
          TransformerEncoder,
          (torch::nn::TransformerEncoderLayer(
               TransformerEncoderLayerOptions(6, 2).dim_feedforward(5).dropout(0.0)),
           2),
          (in({4, 2, 6}))),
      CASE(
          TransformerEncoder,
          (TransformerEncoderOptions(
               TransformerEncoderLayerOptions(6, 2).dim_feedforward(5).dropout(0.0), 2)
               .norm(AnyModule(torch::nn::LayerNorm(std::vector<int64_t>{6})))),
          (in({4, 2, 6}))),
      CASE(
          TransformerDecoder,
          (torch::nn::TransformerDecoderLayer(
               TransformerDecoderLayerOptions(6, 2).dim_feedforward(5).dropout(0.0)),
           2),
          (in({4, 2, 6}), in({5, 2, 6}))),
      CASE(
          Transformer,
          (TransformerOptions(6, 2)
               .num_encoder_layers(1)
               .num_decoder_layers(1)
               .dim_feedforward(5)
               .dropout(0.0)),
          (in({4, 2, 6}), in({3, 2, 6}), Tensor(), causal(3))),
      CASE(
          AdaptiveLogSoftmaxWithLoss, (16, 9, std::vector<int64_t>{3, 5}),
          (in({4, 16}), torch::tensor({1, 4, 8, 0}))), // all clusters get a gradient
  });
}

TEST(Nn, Activations) {
  expect_all_like_torch({
      CASE(ELU, (), (in({4, 6}))),
      CASE(SELU, (), (in({4, 6}))),
      CASE(CELU, (), (in({4, 6}))),
      CASE(GELU, (), (in({4, 6}))),
      CASE(GELU, (torch::nn::GELUOptions().approximate("tanh")), (in({4, 6}))),
      CASE(GLU, (), (in({4, 6}))),
      CASE(SiLU, (), (in({4, 6}))),
      CASE(Mish, (), (in({4, 6}))),
      CASE(ReLU, (), (in({4, 6}))),
      CASE(ReLU, (torch::nn::ReLUOptions().inplace(true)), (in({4, 6}) * 2)),
      CASE(ReLU6, (), (in({4, 6}))),
      CASE(LeakyReLU, (), (in({4, 6}))),
      CASE(PReLU, (torch::nn::PReLUOptions().num_parameters(6)), (in({4, 6}))),
      CASE(PReLU, (), (in({4, 6}))),
      CASE(RReLU, (), (in({4, 6}))),
      CASE(Threshold, (0.1, 20), (in({4, 6}))),
      CASE(Hardshrink, (), (in({4, 6}))),
      CASE(Hardtanh, (), (in({4, 6}))),
      CASE(Sigmoid, (), (in({4, 6}))),
      CASE(LogSigmoid, (), (in({4, 6}))),
      CASE(Tanh, (), (in({4, 6}))),
      CASE(Tanhshrink, (), (in({4, 6}))),
      CASE(Softplus, (), (in({4, 6}))),
      CASE(Softshrink, (), (in({4, 6}))),
      CASE(Softsign, (), (in({4, 6}))),
      CASE(Softmax, (1), (in({4, 6}))),
      CASE(Softmax2d, (), (in({2, 3, 2, 2}))),
      CASE(Softmin, (1), (in({4, 6}))),
      CASE(LogSoftmax, (1), (in({4, 6}))),
  });
}

TEST(Nn, Pools) {
  using namespace torch::nn;
  expect_all_like_torch({
      CASE(AvgPool1d, (2), (in({1, 2, 6}))),
      CASE(AvgPool2d, (AvgPool2dOptions({2, 3}).stride(1)), (in({1, 2, 6, 6}))),
      CASE(AvgPool3d, (2), (in({1, 2, 4, 4, 4}))),
      CASE(MaxPool1d, (2), (in({1, 2, 6}))),
      CASE(MaxPool2d, (MaxPool2dOptions({2, 3}).stride(1)), (in({1, 2, 6, 6}))),
      CASE(MaxPool3d, (2), (in({1, 2, 4, 4, 4}))),
      CASE(MaxUnpool1d, (2), (in({1, 1, 3}), torch::tensor({{{0, 2, 4}}}))),
      CASE(MaxUnpool2d, (2), (in({1, 1, 1, 1}), torch::zeros({1, 1, 1, 1}, torch::kLong))),
      CASE(
          MaxUnpool3d, (2),
          (in({1, 1, 1, 1, 1}), torch::zeros({1, 1, 1, 1, 1}, torch::kLong),
           std::vector<int64_t>{1, 1, 3, 2, 2})),
      CASE(AdaptiveAvgPool1d, (3), (in({1, 2, 7}))),
      CASE(AdaptiveAvgPool2d, (AdaptiveAvgPool2dOptions({3, std::nullopt})), (in({1, 2, 7, 7}))),
      CASE(AdaptiveAvgPool3d, (3), (in({1, 2, 5, 5, 5}))),
      CASE(AdaptiveMaxPool1d, (3), (in({1, 2, 7}))),
      CASE(AdaptiveMaxPool2d, (3), (in({1, 2, 7, 7}))),
      CASE(AdaptiveMaxPool3d, (3), (in({1, 2, 5, 5, 5}))),
      CASE(LPPool1d, (2, 2), (in({1, 2, 6}))),
      CASE(LPPool2d, (2, 2), (in({1, 2, 6, 6}))),
      CASE(LPPool3d, (2, 2), (in({1, 2, 4, 4, 4}))),
      CASE(FractionalMaxPool2d, (FractionalMaxPool2dOptions(2).output_size(3)), (in({1, 2, 7, 7}))),
      CASE(
          FractionalMaxPool3d, (FractionalMaxPool3dOptions(2).output_size(3)),
          (in({1, 2, 7, 7, 7}))),
  });
}

TEST(Nn, Pads) {
  expect_all_like_torch({
      CASE(ReflectionPad1d, (2), (in({1, 2, 4}))),
      CASE(ReflectionPad2d, (torch::nn::ReflectionPad2dOptions({1, 1, 2, 0})), (in({1, 2, 4, 4}))),
      CASE(ReflectionPad3d, (2), (in({1, 2, 4, 4, 4}))),
      CASE(ReplicationPad1d, (2), (in({1, 2, 4}))),
      CASE(ReplicationPad2d, (2), (in({1, 2, 4, 4}))),
      CASE(ReplicationPad3d, (2), (in({1, 2, 4, 4, 4}))),
      CASE(ZeroPad1d, (2), (in({1, 2, 4}))),
      CASE(ZeroPad2d, (2), (in({1, 2, 4, 4}))),
      CASE(ZeroPad3d, (2), (in({1, 2, 4, 4, 4}))),
      CASE(ConstantPad1d, (2, 3.5), (in({1, 2, 4}))),
      CASE(ConstantPad2d, (2, 3.5), (in({1, 2, 4, 4}))),
      CASE(ConstantPad3d, (2, 3.5), (in({1, 2, 4, 4, 4}))),
  });
}

TEST(Nn, Losses) {
  using namespace torch::nn;
  expect_all_like_torch({
      CASE(L1Loss, (), (in({4, 6}), in({4, 6}))),
      CASE(MSELoss, (torch::kSum), (in({4, 6}), in({4, 6}))),
      CASE(SmoothL1Loss, (), (in({4, 6}), in({4, 6}))),
      CASE(HuberLoss, (), (in({4, 6}), in({4, 6}))),
      CASE(KLDivLoss, (torch::kBatchMean), (in({4, 6}), in({4, 6}).sigmoid())),
      CASE(BCELoss, (), (in({4, 6}).sigmoid(), in({4, 6}).sigmoid())),
      CASE(BCEWithLogitsLoss, (), (in({4, 6}), in({4, 6}).sigmoid())),
      CASE(NLLLoss, (), (in({4, 6}), ids(6, {4}))),
      CASE(
          CrossEntropyLoss, (CrossEntropyLossOptions().label_smoothing(0.1)),
          (in({4, 6}), ids(6, {4}))),
      CASE(PoissonNLLLoss, (), (in({4, 6}), in({4, 6}).exp())),
      CASE(
          CTCLoss, (),
          (in({9, 2, 5}).log_softmax(2), ids(4, {2, 3}) + 1, torch::tensor({9, 9}),
           torch::tensor({3, 2}))),
      CASE(MultiMarginLoss, (), (in({4, 6}), ids(6, {4}))),
      CASE(MultiLabelMarginLoss, (), (in({1, 4}), torch::tensor({{3, 0, -1, 1}}))),
      CASE(MultiLabelSoftMarginLoss, (), (in({4, 6}), ids(2, {4, 6}).to(torch::kFloat))),
      CASE(SoftMarginLoss, (), (in({4, 6}), signs({4, 6}))),
      CASE(HingeEmbeddingLoss, (), (in({4, 6}), signs({4, 6}))),
      CASE(CosineEmbeddingLoss, (), (in({4, 6}), in({4, 6}), signs({4}))),
      CASE(MarginRankingLoss, (), (in({4}), in({4}), signs({4}))),
      CASE(TripletMarginLoss, (), (in({4, 6}), in({4, 6}), in({4, 6}))),
      CASE(TripletMarginWithDistanceLoss, (), (in({4, 6}), in({4, 6}), in({4, 6}))),
  });
}

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
  nn::RMSNorm norm(nn::RMSNormOptions({4}).eps(1e-2));
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

} // namespace
} // namespace fsdp
