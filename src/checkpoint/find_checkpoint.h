#pragma once

#include "checkpoint/files.h"

namespace fsdp::detail {

/// Returns `path` if it is a file or the folder of a checkpoint, or the latest checkpoint if it is
/// the folder of a series. Else throws a CheckpointError, which suggests folders below `path` that
/// hold checkpoints.
Path find_checkpoint(const Path& path);

} // namespace fsdp::detail
