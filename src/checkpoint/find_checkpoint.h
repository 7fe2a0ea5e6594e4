#pragma once

#include "checkpoint/files.h"

namespace fsdp::detail {

/// `path`, or the latest of the series there. Throws CheckpointError where there is
/// none, with what may have been meant.
Path find_checkpoint(const Path& path);

} // namespace fsdp::detail
