#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace fsdp::detail {

/// A copy of `bytes` bytes in pieces of `size` bytes; the last piece may be shorter. Pieces begin
/// every `from_step` bytes in the source and every `to_step` bytes in the target.
struct Pieces {
  char* to = nullptr;
  int64_t to_step = 0;
  const char* from = nullptr;
  int64_t from_step = 0;
  int64_t size = 0;
  int64_t bytes = 0; // of all pieces

  int64_t number() const {
    return size > 0 ? (bytes + size - 1) / size : 0;
  }
};

/// Copies the pieces, with several threads if there are enough bytes for each.
inline void copy_pieces(const Pieces& pieces) {
  constexpr int64_t kGrainSize = int64_t{32768} * 4; // bytes: torch's own grain size, in floats
  const auto size = pieces.size;
  const auto grain = kGrainSize / std::max<int64_t>(size, 1) + 1;
  const bool is_one_run = pieces.to_step == size && pieces.from_step == size;
  at::parallel_for(0, pieces.number(), grain, [&](int64_t begin, int64_t end) {
    const auto step = is_one_run ? end - begin : 1; // pieces per memcpy
    for (auto i = begin; i < end; i += step) {
      std::memcpy(
          pieces.to + i * pieces.to_step, pieces.from + i * pieces.from_step,
          std::min(step * size, pieces.bytes - i * size));
    }
  });
}

} // namespace fsdp::detail
