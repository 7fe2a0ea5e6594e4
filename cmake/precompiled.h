// The end of the precompiled headers. Nothing includes it by name.
#pragma once

#include <torch/torch.h>

namespace fsdp::detail {

// A compiler defines the virtual functions of torch's class templates at the end of every file
// that sees them: seconds per file. Those that the precompiled header calls are defined in it,
// once. Nobody calls what is below, and leaving a type out costs time and nothing else.
template <class T>
T& some();

template <class... Modules>
void call_clones() {
  (some<Modules>().torch::nn::template Cloneable<Modules>::clone(), ...);
}

template <class... Convolutions>
void call_convolutions() {
  (some<Convolutions>().Convolutions::reset(), ...);
  (some<Convolutions>().Convolutions::pretty_print(some<std::ostream>()), ...);
}

template <class... States>
void clone_optimizer_states() {
  (std::make_unique<States, const States&>(some<States>()), ...); // as their private clone does
}

template <class... Types>
void compare_types() {
  (static_cast<void>(some<Types>().Types::equals(some<c10::Type>())), ...);
}

inline void call_virtual_functions() {
  using namespace torch::nn; // NOLINT
  call_clones<
      AdaptiveLogSoftmaxWithLossImpl, BilinearImpl, EmbeddingImpl, EmbeddingBagImpl, Conv1dImpl,
      Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl, ConvTranspose2dImpl, ConvTranspose3dImpl,
      CrossMapLRN2dImpl, FoldImpl, FractionalMaxPool2dImpl, FractionalMaxPool3dImpl, GRUCellImpl,
      GRUImpl, GroupNormImpl, LayerNormImpl, LinearImpl, LocalResponseNormImpl, LogSoftmaxImpl,
      LSTMCellImpl, LSTMImpl, ModuleDictImpl, MultiheadAttentionImpl, ParameterDictImpl,
      RNNCellImpl, RNNImpl, SequentialImpl, SoftmaxImpl, SoftminImpl, ThresholdImpl,
      TransformerDecoderImpl, TransformerDecoderLayerImpl, TransformerEncoderImpl,
      TransformerEncoderLayerImpl, UnflattenImpl, UnfoldImpl>();
  call_convolutions<
      ConvNdImpl<1, Conv1dImpl>, ConvNdImpl<2, Conv2dImpl>, ConvNdImpl<3, Conv3dImpl>,
      ConvNdImpl<1, ConvTranspose1dImpl>, ConvNdImpl<2, ConvTranspose2dImpl>,
      ConvNdImpl<3, ConvTranspose3dImpl>>();
  clone_optimizer_states<
      torch::optim::AdagradParamState, torch::optim::AdamParamState, torch::optim::AdamWParamState,
      torch::optim::LBFGSParamState, torch::optim::RMSpropParamState,
      torch::optim::SGDParamState>();
  compare_types<
      c10::SingleElementType<c10::TypeKind::ListType, c10::ListType>,
      c10::SingleElementType<c10::TypeKind::FutureType, c10::FutureType>,
      c10::SingleElementType<c10::TypeKind::AwaitType, c10::AwaitType>,
      c10::SingleElementType<c10::TypeKind::RRefType, c10::RRefType>>();
}

} // namespace fsdp::detail
