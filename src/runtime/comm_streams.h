#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "runtime/stream.h"

namespace fsdp::detail {

// Note [Streams of a rank]
//
// Memory that was allocated on a stream returns to this stream when it is freed, and the stream's
// next work may write to it. This is safe only if the stream waits for all users of the memory. Our
// streams wait for the compute of one rank, so two ranks must not share a stream, and a rank must
// not use a stream that somebody else has. Torch gives out streams from a ring of 32 per priority.
// Each rank takes four of high priority once, for all its models. If a device has more than eight
// ranks, the others get no streams and communicate on their compute stream. This is correct, but
// communication does not overlap compute.

struct CommStreams {
  OptionalStream copy_in;
  OptionalStream all_gather;
  OptionalStream reduce_scatter;
  OptionalStream all_reduce;
};

/// The streams of the calling thread, which is a rank. All are empty on a device without streams.
std::shared_ptr<const CommStreams> comm_streams(c10::Device device);

} // namespace fsdp::detail
