#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace fsdp::detail {

/// The properties of a parameter that decide how it lies in its group's buffers.
struct LayoutItem {
  c10::ScalarType dtype = c10::ScalarType::Undefined;        // of the shard
  c10::ScalarType gather_dtype = c10::ScalarType::Undefined; // of the whole
  int64_t padded_numel = 0;                                  // of every rank's shard
  bool extended = false; // sent by an extension, in a form of its own
};

/// The positions of a group's parameters in its flat buffers, in numbers. See Note
/// [Flat layout of a group].
struct FlatLayout {
  struct Span {
    int64_t offset = 0; // both in elements of the buffer
    int64_t numel = 0;
  };
  struct Part {
    Span shard;                   // in the shard buffer
    Span gathered;                // in the input of the gather; no offset if extended
    int64_t unsharded_offset = 0; // in the freeable buffer
  };
  /// Parameters that lie side by side and are cast alike. They are copied together.
  struct Run {
    Span shard;
    Span gathered;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    c10::ScalarType gather_dtype = c10::ScalarType::Undefined;
  };

  /// The dtypes of the two buffers. kByte if the parameters have several.
  c10::ScalarType shard_dtype = c10::ScalarType::Float;
  c10::ScalarType gather_dtype = c10::ScalarType::Float;
  /// The order of the parameters in the buffers. Those with an extension come last.
  std::vector<size_t> order;
  size_t num_plain = 0;
  std::vector<Part> parts; // by parameter
  std::vector<Run> runs;   // of the parameters without extension
  int64_t shard_numel = 0;
  int64_t gathered_numel = 0; // that one rank sends, extensions left out
  int64_t unsharded_numel = 0;

  bool all_plain() const {
    return num_plain == parts.size();
  }
  /// True if the shard buffer is sent as it is.
  bool sends_shards() const;
};

FlatLayout flat_layout(const std::vector<LayoutItem>& items, int64_t num_ranks);

} // namespace fsdp::detail
