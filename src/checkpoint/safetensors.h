#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files.h"

namespace fsdp::detail {

// A safetensors file: the length of the header in 8 bytes, little-endian; the
// header, JSON; the tensors one behind the other, without gaps.

/// "F32" and the like; throws CheckpointError, naming `where`, for a dtype that
/// the format does not have.
std::string dtype_name(at::ScalarType dtype, const std::string& where);
at::ScalarType dtype_of(const std::string& name, const std::string& where);

/// Bytes of a tensor, unless they are more than can be counted.
std::optional<int64_t> tensor_bytes(const std::vector<int64_t>& sizes, at::ScalarType dtype);

struct SafetensorsEntry {
  std::string name;
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> sizes;
  int64_t offset = 0; // of its first byte in the file

  int64_t bytes() const;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries; // by offset
  std::map<std::string, std::string> metadata;
};

/// Bytes up to the first tensor, from the file's first 8.
int64_t safetensors_data_offset(
    std::string_view first_bytes, int64_t file_bytes, const std::string& file);
/// `start` is all up to there. Believes nothing that it has not checked.
SafetensorsHeader parse_safetensors(
    std::string_view start, int64_t file_bytes, const std::string& file);
SafetensorsHeader read_safetensors(const File& file);

/// Orders the entries such that each lies aligned, sets their offsets, and returns
/// the start of the file.
std::string layout_safetensors(SafetensorsHeader& header, const std::string& file);

} // namespace fsdp::detail
