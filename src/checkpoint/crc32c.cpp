#include "checkpoint/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace fsdp::detail {

namespace {

// Reflected polynomials: of CRC-32C, and of the CRC-32 in zip files.
constexpr uint32_t kPolynomial = 0x82f63b78;
constexpr uint32_t kZipPolynomial = 0xedb88320;

using Tables = std::array<std::array<uint32_t, 256>, 8>;

/// Table k maps a byte to the state after this byte and k zero bytes. With eight tables, eight
/// bytes are looked up at once.
constexpr Tables make_tables(uint32_t polynomial) {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) ? polynomial : 0);
    }
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const auto before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables(kPolynomial);
constexpr Tables kZipTables = make_tables(kZipPolynomial);

uint32_t by_tables(const Tables& tables, const void* data, size_t size, uint32_t crc) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; size >= 8; size -= 8, bytes += 8) {
    uint32_t next = 0;
    for (size_t i = 0; i < 4; ++i) {
      next ^= tables[7 - i][(crc >> (8 * i) & 0xff) ^ bytes[i]];
      next ^= tables[3 - i][bytes[4 + i]];
    }
    crc = next;
  }
  for (; size > 0; --size, ++bytes) {
    crc = (crc >> 8) ^ tables[0][(crc & 0xff) ^ *bytes];
  }
  return ~crc;
}

#if defined(__x86_64__)
constexpr size_t kStride = 8192; // bytes; a power of two

/// Maps a state to the state after `kStride` zero bytes. The map is linear in the bits of the
/// state, so each byte of the state has its own table.
class Skip {
 public:
  Skip() {
    std::array<uint32_t, 32> after{}; // what each bit becomes, at first after one zero byte
    for (size_t bit = 0; bit < 32; ++bit) {
      const auto state = uint32_t{1} << bit;
      after[bit] = (state >> 8) ^ kTables[0][state & 0xff];
    }
    for (size_t bytes = 1; bytes < kStride; bytes *= 2) {
      auto twice = after;
      for (auto& state : twice) {
        state = apply(after, state);
      }
      after = twice;
    }
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (uint32_t k = 0; k < 4; ++k) {
        tables_[k][byte] = apply(after, byte << (8 * k));
      }
    }
  }

  uint32_t operator()(uint32_t state) const {
    return tables_[0][state & 0xff] ^ tables_[1][state >> 8 & 0xff] ^
           tables_[2][state >> 16 & 0xff] ^ tables_[3][state >> 24];
  }

 private:
  static uint32_t apply(const std::array<uint32_t, 32>& after, uint32_t state) {
    uint32_t result = 0;
    for (size_t bit = 0; bit < 32; ++bit) {
      result ^= (state >> bit & 1) ? after[bit] : 0;
    }
    return result;
  }

  std::array<std::array<uint32_t, 256>, 4> tables_{};
};

uint64_t word_at(const unsigned char* bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, 8);
  return word;
}

__attribute__((target("sse4.2"))) uint32_t
crc32c_by_instruction(const void* data, size_t size, uint32_t crc) {
  static const Skip skip;
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint64_t state = ~crc;
  // The instruction takes three cycles, but one can begin in every cycle. So three stretches are
  // computed at once.
  for (; size >= 3 * kStride; size -= 3 * kStride, bytes += 3 * kStride) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = 0; i < kStride; i += 8) {
      state = _mm_crc32_u64(state, word_at(bytes + i));
      second = _mm_crc32_u64(second, word_at(bytes + kStride + i));
      third = _mm_crc32_u64(third, word_at(bytes + 2 * kStride + i));
    }
    state = skip(static_cast<uint32_t>(state)) ^ second;
    state = skip(static_cast<uint32_t>(state)) ^ third;
  }
  for (; size >= 8; size -= 8, bytes += 8) {
    state = _mm_crc32_u64(state, word_at(bytes));
  }
  auto result = static_cast<uint32_t>(state);
  for (; size > 0; --size, ++bytes) {
    result = _mm_crc32_u8(result, *bytes);
  }
  return ~result;
}
#endif

} // namespace

uint32_t crc32c_by_tables(const void* data, size_t size, uint32_t crc) {
  return by_tables(kTables, data, size, crc);
}

uint32_t crc32(const void* data, size_t size, uint32_t crc) {
  return by_tables(kZipTables, data, size, crc);
}

uint32_t crc32c(const void* data, size_t size, uint32_t crc) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) {
    return crc32c_by_instruction(data, size, crc);
  }
#endif
  return crc32c_by_tables(data, size, crc);
}

} // namespace fsdp::detail
