#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace fsdp::detail {

/// What the layout of a group needs to know of one of its parameters.
struct LayoutItem {
  c10::ScalarType dtype = c10::ScalarType::Undefined;        // of its shard
  c10::ScalarType gather_dtype = c10::ScalarType::Undefined; // of the whole
  int64_t padded_numel = 0;                                  // of every rank's shard
  bool extended = false; // sent by an extension, in a form of its own
};

/// Where a group's parameters lie in its flat buffers: numbers only. See Note
/// [Flat layout of a group].
struct FlatLayout {
  struct Span {
    int64_t offset = 0; // both in elements of the buffer
    int64_t numel = 0;
  };
  struct Part {
    Span shard;                   // in the shard buffer
    Span gathered;                // in what one rank sends; an extended one's has no offset
    int64_t unsharded_offset = 0; // in the freeable buffer
  };
  /// Neighbours that are cast alike, so that they are copied together.
  struct Run {
    Span shard;
    Span gathered;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    c10::ScalarType gather_dtype = c10::ScalarType::Undefined;
  };

  /// Of the buffers; bytes where the parameters' differ.
  c10::ScalarType shard_dtype = c10::ScalarType::Float;
  c10::ScalarType gather_dtype = c10::ScalarType::Float;
  /// Of the parameters in the buffers: extended ones last.
  std::vector<size_t> order;
  size_t num_plain = 0;
  std::vector<Part> parts; // by parameter
  std::vector<Run> runs;   // of the plain ones
  int64_t shard_numel = 0;
  int64_t gathered_numel = 0; // that one rank sends of the plain ones
  int64_t unsharded_numel = 0;

  bool all_plain() const {
    return num_plain == parts.size();
  }
  /// Whether the shard buffer is what is sent.
  bool sends_shards() const;
};

FlatLayout flat_layout(const std::vector<LayoutItem>& items, int64_t num_ranks);

} // namespace fsdp::detail
