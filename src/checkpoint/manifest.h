#pragma once

#include <string>
#include <string_view>

#include "checkpoint/catalog.h"

namespace fsdp::detail {

inline constexpr const char* kManifestName = "manifest.json";

// manifest.json, version 1:
//   {"crc32c": "...", of the bytes after this field and its comma
//    "format": "fsdp.checkpoint", "version": 1, "id": ..., "time": ..., "block_bytes": ...,
//    "tensors": [{"name": ..., "dtype": "F32", "shape": [...], "pieces":
//      [{"file": ..., "offset": bytes, "offsets": [...], "sizes": [...], "crc32c": [...]}]}],
//    "values": [[name, value]]}
// Lists keep the order of the state dict. Each rank describes its own files in the same form, and
// rank 0 merges these descriptions.

/// Returns the beginning of a manifest: the checksum of `rest`, which follows it.
std::string manifest_checksum(std::string_view rest);
std::string manifest_text(const Catalog& catalog, const std::string& file);
/// The values alone, in the same form, and back.
std::string values_text(const StoredValues& values, const std::string& file);
StoredValues parse_values(std::string_view text, const std::string& file);
/// Checks the form only: not the checksum, the coverage of the tensors, or the files.
Catalog parse_manifest(std::string_view text, const std::string& file);
/// Reads a manifest, compares it with its checksum, and parses it.
Catalog read_manifest(const Path& path);

} // namespace fsdp::detail
