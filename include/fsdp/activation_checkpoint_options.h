#pragma once

#include <memory>

#include <fsdp/save_policy.h>

namespace fsdp {

/// How a call of checkpoint(), or of a module that apply_activation_checkpointing has chosen, is
/// made again in backward.
struct ActivationCheckpointOptions {
  /// Whether recomputation draws the same random numbers from torch's default generators as
  /// forward did. Afterwards the generators continue as if nothing had been drawn again.
  bool preserve_rng_state = true;
  /// Whether recomputation ends as soon as it has what backward needs. It then ends by an
  /// exception that does not derive from std::exception, which must not pass through a noexcept
  /// function.
  bool early_stop = true;
  /// Whether to throw if recomputation saves tensors of other sizes, dtypes or devices than
  /// forward did, or if a weight was written to in between. Saving fewer tensors is always an
  /// error; without `early_stop`, so is saving more.
  bool determinism_check = true;
  /// Chooses results of operators to keep, so that recomputation does not run these operators
  /// again. If this is null, none are kept. See save_matmuls, save_operators and save_within.
  std::shared_ptr<SavePolicy> save;
};

} // namespace fsdp
