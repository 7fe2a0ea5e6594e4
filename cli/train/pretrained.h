#pragma once

#include <string>

#include "cli/train/model.h"

namespace fsdp::cli {

/// Fills a model, sharded or not, from the safetensors files of a Hugging Face folder. Each rank
/// reads only the bytes that it needs. Throws CheckpointError that names the tensor if the files
/// lack one or have one of another shape, and ConfigError if they have one that the model does not
/// use. Collective over the world.
void load_pretrained(Transformer& model, const std::string& folder);

} // namespace fsdp::cli
