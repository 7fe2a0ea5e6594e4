#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/files.h"
#include "checkpoint/catalog.h"

namespace fsdp::detail {

// A folder that Python's torch.distributed.checkpoint (DCP) wrote consists of
//   .metadata      a pickle: dtype and sizes of each tensor, the boxes that its pieces cover, and
//                  where in the files each piece and each other object lies
//   __0_0.distcp   ... of each rank: one archive of torch.save after the other, each with a piece
//                  of a tensor or with another object
// An archive of torch.save is a zip archive: data.pkl describes an object, data/0 has the bytes of
// its tensor. DCP itself runs these pickles. This library does not, see Pickle.

inline constexpr const char* kDcpMetadataName = ".metadata";
inline constexpr const char* kDcpSuffix = ".distcp";

/// Reads `.metadata`. Checks its form only: neither the coverage of the tensors nor the files. All
/// that is not a tensor is in `objects`.
Catalog read_dcp(const Path& folder);

/// Moves what the objects hold to the catalog's values, and finds the types of what stays. A
/// number, flag or string becomes a value of its name. A list, tuple or dict becomes a value for
/// each item: "betas" becomes "betas.0" and "betas.1". None becomes nothing.
void read_dcp_values(Catalog& catalog);

/// Where a piece of a tensor lies, and how.
struct DcpPiece {
  int64_t offset = 0;           // of its first element in the file
  std::vector<int64_t> strides; // empty if it is row-major; there are no gaps in any case
  // The bytes under one checksum, which may be more than the piece.
  int64_t record = 0;
  int64_t record_bytes = 0;
  std::optional<uint32_t> crc;
};

/// Throws CheckpointError if the file contradicts `.metadata`, or has something else than an
/// ordinary tensor.
DcpPiece open_dcp_piece(const File& file, const StoredTensor& tensor, const StoredPiece& piece);
/// Throws CheckpointError unless the piece has its checksum, if there is one. Reads all of it.
void check_dcp_piece(const File& file, const StoredTensor& tensor, const DcpPiece& piece);
/// Throws CheckpointError if the archive of an object is damaged.
void check_dcp_object(const File& file, const StoredObject& object);

} // namespace fsdp::detail
