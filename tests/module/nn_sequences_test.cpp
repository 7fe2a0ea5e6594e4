// Recurrent modules and transformers of fsdp::nn, beside torch's.
#include "module/nn_cases.h"

namespace fsdp {
namespace {

using namespace test;
using LstmResult = std::tuple<Tensor, std::tuple<Tensor, Tensor>>;

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

} // namespace
} // namespace fsdp
