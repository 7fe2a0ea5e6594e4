// Layers of fsdp::nn: bit for bit torch's own, and the same again when they are sharded.
#include "module/nn_cases.h"

namespace fsdp {
namespace {

using namespace test;

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

} // namespace
} // namespace fsdp
