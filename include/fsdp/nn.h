#pragma once

// LibTorch's built-in modules, hooked (see hooked.h) so that each can be given to fully_shard.
// Write `namespace nn = fsdp::nn;` in place of torch::nn. Names that are not declared here are
// torch's own.

#include <ATen/ops/rms_norm.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/init.h>
#include <torch/nn/modules.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include <fsdp/hooked.h>

FSDP_TREE(torch::nn::ASMoutput, output, loss);

template <>
struct fsdp::Tree<torch::nn::utils::rnn::PackedSequence> {
  static void visit(torch::nn::utils::rnn::PackedSequence& packed, auto&& f) {
    f(const_cast<at::Tensor&>(packed.data())); // the other members hold indices
  }
};

namespace fsdp::nn {

// Brings in the options, functional and init. Also ModuleList, ModuleDict, ParameterList and
// ParameterDict: these have no forward, so give fully_shard their elements or the module that
// calls them.
using namespace torch::nn;

#define FSDP_NN(Name) FSDP_MODULE_IMPL(Name, ::torch::nn::Name##Impl)
// clang-format off
FSDP_NN(Linear); FSDP_NN(Bilinear); FSDP_NN(Identity); FSDP_NN(Flatten); FSDP_NN(Unflatten);
FSDP_NN(Functional); FSDP_NN(Fold); FSDP_NN(Unfold); FSDP_NN(Upsample);
FSDP_NN(PixelShuffle); FSDP_NN(PixelUnshuffle); FSDP_NN(CosineSimilarity); FSDP_NN(PairwiseDistance);

FSDP_NN(Conv1d); FSDP_NN(Conv2d); FSDP_NN(Conv3d);
FSDP_NN(ConvTranspose1d); FSDP_NN(ConvTranspose2d); FSDP_NN(ConvTranspose3d);

FSDP_NN(BatchNorm1d); FSDP_NN(BatchNorm2d); FSDP_NN(BatchNorm3d);
FSDP_NN(InstanceNorm1d); FSDP_NN(InstanceNorm2d); FSDP_NN(InstanceNorm3d);
FSDP_NN(LayerNorm); FSDP_NN(GroupNorm); FSDP_NN(LocalResponseNorm); FSDP_NN(CrossMapLRN2d);

FSDP_NN(Dropout); FSDP_NN(Dropout2d); FSDP_NN(Dropout3d);
FSDP_NN(AlphaDropout); FSDP_NN(FeatureAlphaDropout);

FSDP_NN(RNN); FSDP_NN(LSTM); FSDP_NN(GRU); FSDP_NN(RNNCell); FSDP_NN(LSTMCell); FSDP_NN(GRUCell);

// LibTorch builds the modules inside these, and they are not hooked. So only the outer module can
// be given to fully_shard.
FSDP_NN(MultiheadAttention); FSDP_NN(TransformerEncoderLayer); FSDP_NN(TransformerDecoderLayer);
FSDP_NN(TransformerEncoder); FSDP_NN(TransformerDecoder); FSDP_NN(Transformer);
FSDP_NN(AdaptiveLogSoftmaxWithLoss);

FSDP_NN(ELU); FSDP_NN(SELU); FSDP_NN(CELU); FSDP_NN(GELU); FSDP_NN(GLU); FSDP_NN(SiLU); FSDP_NN(Mish);
FSDP_NN(ReLU); FSDP_NN(ReLU6); FSDP_NN(LeakyReLU); FSDP_NN(PReLU); FSDP_NN(RReLU); FSDP_NN(Threshold);
FSDP_NN(Hardshrink); FSDP_NN(Hardtanh); FSDP_NN(Sigmoid); FSDP_NN(LogSigmoid); FSDP_NN(Tanh);
FSDP_NN(Tanhshrink); FSDP_NN(Softplus); FSDP_NN(Softshrink); FSDP_NN(Softsign);
FSDP_NN(Softmax); FSDP_NN(Softmax2d); FSDP_NN(Softmin); FSDP_NN(LogSoftmax);

FSDP_NN(AvgPool1d); FSDP_NN(AvgPool2d); FSDP_NN(AvgPool3d);
FSDP_NN(MaxPool1d); FSDP_NN(MaxPool2d); FSDP_NN(MaxPool3d);
FSDP_NN(MaxUnpool1d); FSDP_NN(MaxUnpool2d); FSDP_NN(MaxUnpool3d);
FSDP_NN(AdaptiveAvgPool1d); FSDP_NN(AdaptiveAvgPool2d); FSDP_NN(AdaptiveAvgPool3d);
FSDP_NN(AdaptiveMaxPool1d); FSDP_NN(AdaptiveMaxPool2d); FSDP_NN(AdaptiveMaxPool3d);
FSDP_NN(LPPool1d); FSDP_NN(LPPool2d); FSDP_NN(LPPool3d);
FSDP_NN(FractionalMaxPool2d); FSDP_NN(FractionalMaxPool3d);

FSDP_NN(ReflectionPad1d); FSDP_NN(ReflectionPad2d); FSDP_NN(ReflectionPad3d);
FSDP_NN(ReplicationPad1d); FSDP_NN(ReplicationPad2d); FSDP_NN(ReplicationPad3d);
FSDP_NN(ZeroPad1d); FSDP_NN(ZeroPad2d); FSDP_NN(ZeroPad3d);
FSDP_NN(ConstantPad1d); FSDP_NN(ConstantPad2d); FSDP_NN(ConstantPad3d);

FSDP_NN(L1Loss); FSDP_NN(MSELoss); FSDP_NN(SmoothL1Loss); FSDP_NN(HuberLoss); FSDP_NN(KLDivLoss);
FSDP_NN(BCELoss); FSDP_NN(BCEWithLogitsLoss); FSDP_NN(NLLLoss); FSDP_NN(CrossEntropyLoss);
FSDP_NN(PoissonNLLLoss); FSDP_NN(CTCLoss); FSDP_NN(MultiMarginLoss); FSDP_NN(MultiLabelMarginLoss);
FSDP_NN(MultiLabelSoftMarginLoss); FSDP_NN(SoftMarginLoss); FSDP_NN(HingeEmbeddingLoss);
FSDP_NN(CosineEmbeddingLoss); FSDP_NN(MarginRankingLoss); FSDP_NN(TripletMarginLoss);
FSDP_NN(TripletMarginWithDistanceLoss);
// clang-format on
#undef FSDP_NN

class Sequential : public Holder<torch::nn::SequentialImpl> {
 public:
  using Holder<torch::nn::SequentialImpl>::Holder;
  Sequential() = default;
  Sequential(std::initializer_list<torch::nn::NamedAnyModule> named_modules)
      : Holder(std::make_shared<Impl>(named_modules)) {}
};

class Embedding : public Holder<torch::nn::EmbeddingImpl> {
 public:
  using Holder<torch::nn::EmbeddingImpl>::Holder;
  static Embedding from_pretrained(
      const at::Tensor& embeddings, const EmbeddingFromPretrainedOptions& options = {}) {
    return Embedding(std::move(*torch::nn::Embedding::from_pretrained(embeddings, options)));
  }
};

class EmbeddingBag : public Holder<torch::nn::EmbeddingBagImpl> {
 public:
  using Holder<torch::nn::EmbeddingBagImpl>::Holder;
  static EmbeddingBag from_pretrained(
      const at::Tensor& embeddings, const EmbeddingBagFromPretrainedOptions& options = {}) {
    return EmbeddingBag(std::move(*torch::nn::EmbeddingBag::from_pretrained(embeddings, options)));
  }
};

// ------------------------------------------------------------ RMSNorm, which LibTorch lacks

struct RMSNormOptions {
  // NOLINTBEGIN(google-explicit-constructor): a shape is enough, as for LayerNormOptions
  RMSNormOptions(std::vector<int64_t> normalized_shape)
      : normalized_shape_(std::move(normalized_shape)) {}
  RMSNormOptions(int64_t normalized_size) : normalized_shape_({normalized_size}) {}
  // NOLINTEND(google-explicit-constructor)
  TORCH_ARG(std::vector<int64_t>, normalized_shape);
  /// If not set, the machine epsilon of the input's dtype.
  TORCH_ARG(std::optional<double>, eps) = std::nullopt;
  TORCH_ARG(bool, elementwise_affine) = true;
};

class RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  explicit RMSNormImpl(std::vector<int64_t> normalized_shape)
      : RMSNormImpl(RMSNormOptions(std::move(normalized_shape))) {}
  explicit RMSNormImpl(int64_t normalized_size) : RMSNormImpl(RMSNormOptions(normalized_size)) {}
  explicit RMSNormImpl(RMSNormOptions options_) : options(std::move(options_)) {
    RMSNormImpl::reset();
  }

  void reset() override {
    weight = options.elementwise_affine()
                 ? register_parameter("weight", at::empty(options.normalized_shape()))
                 : register_parameter("weight", at::Tensor(), /*requires_grad=*/false);
    reset_parameters();
  }
  void reset_parameters() {
    if (weight.defined()) {
      torch::nn::init::ones_(weight);
    }
  }
  void pretty_print(std::ostream& stream) const override {
    stream << "fsdp::nn::RMSNorm(" << at::IntArrayRef(options.normalized_shape()) << ", eps=";
    options.eps() ? stream << *options.eps() : stream << "None";
    stream << ", elementwise_affine=" << (weight.defined() ? "true" : "false") << ')';
  }
  at::Tensor forward(const at::Tensor& input) {
    const auto scale = weight.defined() ? std::optional(weight) : std::nullopt;
    return at::rms_norm(input, options.normalized_shape(), scale, options.eps());
  }

  RMSNormOptions options;
  at::Tensor weight;
};
FSDP_MODULE(RMSNorm);

} // namespace fsdp::nn
