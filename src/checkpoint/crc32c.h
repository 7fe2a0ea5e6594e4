#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp::detail {

/// Returns the CRC-32C (Castagnoli) of `size` bytes. `crc` is the checksum of the bytes before
/// them. Uses the processor's own instruction if there is one.
uint32_t crc32c(const void* data, size_t size, uint32_t crc = 0);

/// Returns the same, computed with tables. For processors without the instruction.
uint32_t crc32c_by_tables(const void* data, size_t size, uint32_t crc = 0);

/// Returns the CRC-32 that zip files have, in the same way.
uint32_t crc32(const void* data, size_t size, uint32_t crc = 0);

} // namespace fsdp::detail
