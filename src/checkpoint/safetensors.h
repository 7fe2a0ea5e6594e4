#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"

namespace fsdp::detail {

// A safetensors file consists of the length of the header, in 8 bytes, little-endian; the header,
// in JSON; and the tensors, one after the other without gaps.

/// Return the format's name of a dtype ("F32" for example), and the dtype of a name. If there is
/// none, return nothing or throw a CheckpointError that names `where`.
std::optional<std::string> find_dtype_name(at::ScalarType dtype);
std::string dtype_name(at::ScalarType dtype, const std::string& where);
at::ScalarType dtype_of(const std::string& name, const std::string& where);

/// This is torch's own limit. Many of its operators fail above it. Copying takes time for each row
/// and each dim, so a small file with very many of both would take hours.
inline constexpr size_t kMaxDims = 64;
/// Throws a CheckpointError that names `where` if there are more dims.
void check_dims(const std::vector<int64_t>& sizes, const std::string& where);

/// Returns the bytes of a tensor, or nothing if int64_t cannot hold their number or a size is
/// negative.
std::optional<int64_t> tensor_bytes(const std::vector<int64_t>& sizes, at::ScalarType dtype);

struct SafetensorsEntry {
  std::string name;
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> sizes;
  int64_t offset = 0; // of its first byte in the file

  int64_t bytes() const;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries; // sorted by offset
  std::map<std::string, std::string> metadata;
};

/// Returns where in the file the first tensor begins. `first_bytes` are at least the first 8.
int64_t safetensors_data_offset(
    std::string_view first_bytes, int64_t file_bytes, const std::string& file);
/// Parses the header. `start` is the file up to the first tensor. Throws CheckpointError if any
/// field is wrong, or if the tensors do not fill the file exactly.
SafetensorsHeader parse_safetensors(
    std::string_view start, int64_t file_bytes, const std::string& file);
SafetensorsHeader read_safetensors(const File& file);

/// Orders the entries so that each tensor is aligned, sets their offsets, and returns the bytes of
/// the file before the first tensor.
std::string layout_safetensors(SafetensorsHeader& header, const std::string& file);

} // namespace fsdp::detail
