#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "checkpoint/catalog.h"
#include "checkpoint/plan.h"

namespace fsdp::detail {

/// Reads parts of a checkpoint's tensors.
class Reader {
 public:
  /// `verify`: compares checksums, where the catalog has them.
  Reader(const Catalog& catalog, bool verify) : catalog_(catalog), verify_(verify) {}

  /// What of `stored` the rank holds as `target`, in host memory, in the file's dtype
  /// and the local part's sizes. Reads the bytes that it needs; with checksums, the
  /// blocks that these lie in.
  at::Tensor read(const StoredTensor& stored, const LocalTensor& target);

 private:
  struct Copy {
    int64_t from = 0; // in the piece, in bytes
    char* to = nullptr;
    int64_t bytes = 0;
  };

  void read_block(
      const StoredTensor& stored, const StoredPiece& piece, const std::vector<Copy>& copies);
  const File& file(const std::string& name);

  const Catalog& catalog_;
  const bool verify_;
  std::map<std::string, File> files_;
  std::vector<char> block_;
};

} // namespace fsdp::detail
