#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace fsdp::detail {

/// Pieces of a run of bytes, all of one size but the last, which may be shorter: as many as
/// there are bytes for. They lie at equal distances on both sides.
struct Pieces {
  char* to = nullptr;
  int64_t to_step = 0;
  const char* from = nullptr;
  int64_t from_step = 0;
  int64_t size = 0;
  int64_t bytes = 0; // of all

  int64_t number() const {
    return size > 0 ? (bytes + size - 1) / size : 0;
  }
};

/// Copies them, by several threads where each has enough to copy.
inline void copy_pieces(const Pieces& pieces) {
  constexpr int64_t kGrainSize = 32768 * 4; // from where torch's own operators use threads
  const auto size = pieces.size;
  const auto grain = kGrainSize / std::max<int64_t>(size, 1) + 1;
  const bool is_one_run = pieces.to_step == size && pieces.from_step == size;
  at::parallel_for(0, pieces.number(), grain, [&](int64_t begin, int64_t end) {
    const auto step = is_one_run ? end - begin : 1; // pieces of one copy
    for (auto i = begin; i < end; i += step) {
      std::memcpy(
          pieces.to + i * pieces.to_step, pieces.from + i * pieces.from_step,
          std::min(step * size, pieces.bytes - i * size));
    }
  });
}

} // namespace fsdp::detail
