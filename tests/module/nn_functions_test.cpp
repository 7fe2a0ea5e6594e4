// Modules of fsdp::nn without parameters, beside torch's.
#include "module/nn_cases.h"

namespace fsdp {
namespace {

using namespace test;

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

} // namespace
} // namespace fsdp
