#pragma once

#include <string>

#include "cli/train/model.h"

namespace fsdp::cli {

/// Throws ConfigError that names --from if the folder lacks safetensors files that it should have,
/// or has the weights twice.
void check_weight_files(const std::string& folder);

/// A hash of the names and shapes of the tensors in a Hugging Face folder, and of samples of its
/// files.
std::string weights_fingerprint(const std::string& folder);

/// Fills a model, sharded or not, from the safetensors files of a Hugging Face folder. Each rank
/// reads only the bytes that it needs. Throws CheckpointError that names the tensor if the files
/// lack one or have one of another shape, and ConfigError if they have one that the model does not
/// use. Collective over the world.
void load_pretrained(Transformer& model, const std::string& folder);

} // namespace fsdp::cli
