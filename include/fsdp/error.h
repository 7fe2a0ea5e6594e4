#pragma once

#include <c10/util/Exception.h>

#include <fsdp/export.h>

namespace fsdp {

/// A collective, a rendezvous or another rank failed. The message names the operation, the
/// process group and the ranks. `what_without_backtrace()` is the message alone.
class FSDP_API CommError : public c10::Error {
  using Error::Error;
};

/// A checkpoint cannot be written or read. The message names the file and the tensor.
class FSDP_API CheckpointError : public c10::Error {
  using Error::Error;
};

/// A loss, a gradient or a norm of gradients is NaN or infinite.
class FSDP_API NonFiniteError : public c10::Error {
  using Error::Error;
};

/// An option, an environment variable or a configuration is not valid.
class FSDP_API ConfigError : public c10::Error {
  using Error::Error;
};

} // namespace fsdp
