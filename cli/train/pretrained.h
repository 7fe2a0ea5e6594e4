#pragma once

#include <fsdp/checkpoint.h>

#include <string>
#include <vector>

#include "cli/train/model.h"

namespace fsdp::cli {

/// Maps names in checkpoints of `fsdp train` to those of Hugging Face, for which the output layer
/// is not a part of the model.
std::vector<NameRule> hf_names();

/// The same for the matrices of LoRA and the names of PEFT.
std::vector<NameRule> adapter_names();

/// Throws ConfigError that names --from if the folder lacks safetensors files that it should have,
/// or has the weights twice.
void check_weight_files(const std::string& folder);

/// Throws ConfigError that names the tensor if the safetensors files of a Hugging Face folder lack
/// one of the model, have one of another shape, or have one that the model does not use; and if a
/// file is damaged. Reads no weights, but for an output layer that is shared with the embedding and
/// has to be equal to it. Needs no process group.
void check_weights_fit(ModelDims dims, const std::string& folder);

/// A hash of the names and shapes of the tensors in a Hugging Face folder, and of samples of each.
/// The same on every machine.
std::string weights_fingerprint(const std::string& folder);

/// Fills a model, sharded or not, from a Hugging Face folder that `check_weights_fit` accepts, but
/// for the matrices of LoRA. Each rank reads only the bytes that it needs, a block at a time.
/// Collective over the world.
void load_pretrained(Transformer& model, const std::string& folder);

/// Fills the matrices of LoRA from a folder of PEFT in the same way.
void load_adapter(Transformer& model, const std::string& folder);

} // namespace fsdp::cli
