#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "runtime/stream.h"

namespace fsdp::detail {

// Note [Streams of a rank]
//
// What is allocated on a stream goes back to it when it is dropped, and what the
// stream is given next may write there. That is right as long as this stream
// waits for whoever used the memory: here for the compute of one rank. So no two
// ranks may share one, nor a rank and somebody's own stream. Torch gives streams
// out of a ring of 32 per priority; ours are of the high one, taken once for each
// rank and all its models. Ranks beyond the eighth on a device get none, and
// communicate on their compute stream: correct, and without overlap.

struct CommStreams {
  OptionalStream copy_in;
  OptionalStream all_gather;
  OptionalStream reduce_scatter;
  OptionalStream all_reduce;
};

/// Those of the calling thread, which is a rank; none on a device without
/// streams.
std::shared_ptr<const CommStreams> comm_streams(c10::Device device);

} // namespace fsdp::detail
