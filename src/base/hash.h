#pragma once

#include <cstdint>
#include <string_view>

namespace fsdp::detail {

// Hashes that are the same in every process, on every machine. (std::hash need not be.)

constexpr uint64_t kEmptyHash = 14695981039346656037U; // FNV-1a

inline uint64_t add_to_hash(uint64_t hash, std::string_view text) {
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211U;
  }
  return (hash ^ text.size()) * 1099511628211U;
}

inline uint64_t add_to_hash(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15U;
  return hash ^ (hash >> 32);
}

} // namespace fsdp::detail
