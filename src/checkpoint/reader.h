#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "checkpoint/catalog.h"
#include "checkpoint/plan.h"

namespace fsdp::detail {

/// Reads parts of a checkpoint's tensors: the bytes that are needed; with checksums,
/// the blocks that these lie in.
class Reader {
 public:
  /// `verify`: compares checksums, where the catalog has them.
  Reader(const Catalog& catalog, bool verify) : catalog_(catalog), verify_(verify) {}

  /// Reads what of `stored` the rank holds as `target`, and keeps nothing of it.
  void check(const StoredTensor& stored, const LocalTensor& target);
  /// The same, in host memory, the file's dtype and the local part's sizes.
  at::Tensor read(const StoredTensor& stored, const LocalTensor& target);
  /// What was checked before, into memory for it; its files must still be the same.
  void read_checked(const StoredTensor& stored, const LocalTensor& target, void* memory);

 private:
  struct Copy {
    int64_t from = 0; // in the piece, in bytes
    int64_t to = 0;   // in the memory
    int64_t bytes = 0;
  };

  void visit(const StoredTensor& stored, const LocalTensor& target, bool verify, char* memory);
  void read_block(
      const StoredTensor& stored,
      const StoredPiece& piece,
      const std::vector<Copy>& copies,
      bool check,
      char* memory);
  const File& file(const std::string& name);

  const Catalog& catalog_;
  const bool verify_;
  std::map<std::string, File> files_;
  std::map<std::string, File::Version> versions_;
  std::vector<char> block_;
};

} // namespace fsdp::detail
