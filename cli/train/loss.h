#pragma once

#include <torch/types.h>

#include "cli/train/model.h"

namespace fsdp::cli {

/// The sum of the losses of all tokens that the model has to predict, each from those before it.
/// `rows`: (count, time + 1) tokens on the device of the model. If they carry flags
/// (see `kIsGiven`), what is given has no loss, and attention stays within examples.
torch::Tensor loss_sum(Transformer& model, const torch::Tensor& rows, bool have_flags);

} // namespace fsdp::cli
