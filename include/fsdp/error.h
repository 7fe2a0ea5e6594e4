#pragma once

#include <c10/util/Exception.h>

#include <fsdp/export.h>

namespace fsdp {

/// A collective, a rendezvous or a peer failed. The message names the
/// operation, the group and the ranks; `what_without_backtrace()` is short.
class FSDP_API CommError : public c10::Error {
  using Error::Error;
};

/// A checkpoint cannot be written or read. The message names file and tensor.
class FSDP_API CheckpointError : public c10::Error {
  using Error::Error;
};

/// An option, environment variable or configuration makes no sense.
class FSDP_API ConfigError : public c10::Error {
  using Error::Error;
};

} // namespace fsdp
