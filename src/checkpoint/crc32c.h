#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp::detail {

/// CRC-32C (Castagnoli) of `size` bytes, continuing from the `crc` of what came
/// before. By the processor's own instruction where there is one.
uint32_t crc32c(const void* data, size_t size, uint32_t crc = 0);

/// The same from tables: what runs elsewhere.
uint32_t crc32c_by_tables(const void* data, size_t size, uint32_t crc = 0);

} // namespace fsdp::detail
