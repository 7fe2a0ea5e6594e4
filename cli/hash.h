#pragma once

#include <cstdint>
#include <string_view>

namespace fsdp::cli {

// Hashes that are the same on every machine. (std::hash need not be.)

/// A number that looks random (splitmix64).
inline uint64_t splitmix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

inline uint64_t add_to_hash(uint64_t hash, std::string_view bytes) {
  for (const char c : bytes) {
    hash = splitmix64(hash ^ static_cast<unsigned char>(c));
  }
  return splitmix64(hash ^ bytes.size());
}

} // namespace fsdp::cli
