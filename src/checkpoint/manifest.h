#pragma once

#include <string>
#include <string_view>

#include "checkpoint/catalog.h"

namespace fsdp::detail {

inline constexpr const char* kManifestName = "manifest.json";

// manifest.json, version 1:
//   {"crc32c": "...", of the bytes behind this field and its comma
//    "format": "fsdp.checkpoint", "version": 1, "id": ..., "time": ..., "block_bytes": ...,
//    "tensors": [{"name": ..., "dtype": "F32", "shape": [...], "pieces":
//      [{"file": ..., "offset": bytes, "offsets": [...], "sizes": [...], "crc32c": [...]}]}],
//    "values": [[name, value]]}
// Lists keep the order of the state dict. Each rank's part of it, which rank 0
// merges, has the same form.

/// The first bytes of a manifest, of which `rest` follows.
std::string manifest_checksum(std::string_view rest);
std::string manifest_text(const Catalog& catalog, const std::string& file);
/// Checks the form, not yet the coverage nor that the files are there.
Catalog parse_manifest(std::string_view text, const std::string& file);
/// And, before, that the text is what was written.
Catalog read_manifest(const Path& path);

} // namespace fsdp::detail
