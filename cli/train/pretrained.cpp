#include "cli/train/pretrained.h"

#include <fsdp/checkpoint.h>
#include <fsdp/checkpoint_tools.h>
#include <fsdp/state_dict.h>

#include "cli/check.h"

namespace fsdp::cli {

namespace {

/// Throws ConfigError if the folder has a tensor that is not in `state`.
void check_all_used(const StateDict& state, const ModelDims& dims, const std::string& folder) {
  for (const auto& tensor : inspect_checkpoint(folder).tensors) {
    const auto& name = tensor.name;
    const bool head = name.starts_with("lm_head.");
    const bool used = state.contains(head ? "model." + name : name);
    // Some programs write the shared weight twice, and tables that can be computed.
    const bool harmless = (head && dims.tied) || name.ends_with("rotary_emb.inv_freq");
    check_config(
        used || harmless, "--from ", folder, ": the model that config.json describes has no '",
        name, "', which ", tensor.pieces.front().file, " holds");
  }
}

} // namespace

void load_pretrained(Transformer& model, const std::string& folder) {
  StateDict state;
  state.insert_all(get_model_state_dict(model), "model.");
  check_all_used(state, model->dims, folder);
  // The output layer is not a part of what Hugging Face calls the model.
  load(state, folder, {.names = {{.from = "model\\.(lm_head\\..*)", .to = "$1"}}});
}

} // namespace fsdp::cli
