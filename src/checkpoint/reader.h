#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/catalog.h"
#include "checkpoint/dcp.h"
#include "checkpoint/plan.h"

namespace fsdp::detail {

/// Throws CheckpointError unless the bytes, which begin at `offset` of the file, have this CRC32C.
void check_block(
    const Path& file,
    const std::string& tensor,
    int64_t offset,
    std::string_view bytes,
    uint32_t crc);

/// Reads parts of a checkpoint's tensors. Without checksums it reads the bytes that are needed and
/// small gaps between them; with checksums, the whole blocks that contain these bytes. A piece in
/// an archive has one checksum, so all of this piece is read once to compare it.
class Reader {
 public:
  /// `verify`: whether to compare checksums, if the catalog has them.
  Reader(const Catalog& catalog, bool verify) : catalog_(catalog), verify_(verify) {}

  /// Reads the part of `stored` that `target` describes, to find errors. Keeps nothing.
  void check(const StoredTensor& stored, const LocalTensor& target);
  /// Returns this part in host memory, with the dtype in the file and the sizes of `target.local`.
  at::Tensor read(const StoredTensor& stored, const LocalTensor& target);
  /// Reads a part into `memory` that `check` has read before. Does not compare checksums. Throws
  /// CheckpointError if a file has changed since.
  void read_checked(const StoredTensor& stored, const LocalTensor& target, void* memory);

 private:
  struct Copy {
    int64_t from = 0; // byte in the piece
    int64_t to = 0;   // byte in the memory
    int64_t bytes = 0;
  };

  void visit(const StoredTensor& stored, const LocalTensor& target, bool verify, char* memory);
  void read_block(
      const StoredTensor& stored,
      const StoredPiece& piece,
      const std::vector<Copy>& copies,
      bool check,
      char* memory);
  const DcpPiece& open_archive(const StoredTensor& stored, const StoredPiece& piece, bool verify);
  void copy_strided(
      const StoredTensor& stored,
      const StoredPiece& piece,
      const DcpPiece& found,
      const Box& common,
      const Block& local,
      char* memory);
  const File& file(const std::string& name);

  const Catalog& catalog_;
  const bool verify_;
  std::map<std::string, File> files_;
  std::map<std::string, File::Version> versions_;
  /// Blocks that had their checksums. A tensor may be read in many small parts, and each part would
  /// need all of its block again.
  std::set<std::pair<const StoredPiece*, int64_t>> checked_;
  std::map<const StoredPiece*, DcpPiece> archives_;
  std::vector<char> block_;
};

} // namespace fsdp::detail
