#include "checkpoint/reader.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/safetensors.h"

namespace fsdp::detail {

namespace {

// Two runs with a gap of at most this many bytes between them are read by one call.
constexpr int64_t kMaxGap = 64 << 10;

} // namespace

void check_block(
    const Path& file,
    const std::string& tensor,
    int64_t offset,
    std::string_view bytes,
    uint32_t crc) {
  FSDP_CHECK_AS(
      CheckpointError, crc32c(bytes.data(), bytes.size()) == crc, file.string(), ", tensor '",
      tensor, "': bytes ", offset, " to ", offset + static_cast<int64_t>(bytes.size()),
      " are damaged: they do not match their checksum");
}

const File& Reader::file(const std::string& name) {
  constexpr size_t kMaxOpen = 256;
  auto found = files_.find(name);
  if (found == files_.end()) {
    if (files_.size() >= kMaxOpen) {
      files_.clear();
    }
    found = files_.emplace(name, File::open(catalog_.folder / name)).first;
    catalog_.opened->check_not_replaced();
  }
  const auto version = found->second.version();
  FSDP_CHECK_AS(
      CheckpointError, versions_.emplace(name, version).first->second == version,
      found->second.path().string(), " was changed while it was read");
  return found->second;
}

/// `copies` must lie in one block, in order. If `memory` is null, nothing is copied.
void Reader::read_block(
    const StoredTensor& stored,
    const StoredPiece& piece,
    const std::vector<Copy>& copies,
    bool check,
    char* memory) {
  const auto piece_bytes = *tensor_bytes(piece.box.sizes, stored.dtype);
  const auto number = copies[0].from / kBlockBytes;
  check = check && !checked_.contains({&piece, number});
  // A checksum needs the whole block. Without a checksum, read from the first to the last copy.
  const auto begin = check ? number * kBlockBytes : copies.front().from;
  const auto end =
      check ? std::min(begin + kBlockBytes, piece_bytes) : copies.back().from + copies.back().bytes;
  const bool direct = memory && copies.size() == 1 && copies[0].bytes == end - begin;
  if (!direct) {
    block_.resize(static_cast<size_t>(std::max<int64_t>(end - begin, block_.size())));
  }
  auto* bytes = direct ? memory + copies[0].to : block_.data();
  try {
    file(piece.file).read(piece.offset + begin, bytes, end - begin);
  } catch (const CheckpointError&) {
    FSDP_THROW(CheckpointError, "tensor '", stored.name, "': ", current_exception_text());
  }
  if (check) {
    check_block(
        catalog_.folder / piece.file, stored.name, piece.offset + begin,
        {bytes, static_cast<size_t>(end - begin)}, piece.crcs[static_cast<size_t>(number)]);
    checked_.emplace(&piece, number);
  }
  if (memory && !direct) {
    for (const auto& copy : copies) {
      std::memcpy(memory + copy.to, bytes + (copy.from - begin), static_cast<size_t>(copy.bytes));
    }
  }
}

/// Returns where in an archive a piece lies. Compares its checksum, if there is one.
const DcpPiece& Reader::open_archive(
    const StoredTensor& stored, const StoredPiece& piece, bool verify) {
  auto found = archives_.find(&piece);
  if (found == archives_.end()) {
    found = archives_.emplace(&piece, open_dcp_piece(file(piece.file), stored, piece)).first;
  }
  if (verify && !checked_.contains({&piece, 0})) {
    check_dcp_piece(file(piece.file), stored, found->second);
    checked_.emplace(&piece, 0);
  }
  return found->second;
}

/// Copies the box `common` of a piece that is not row-major.
void Reader::copy_strided(
    const StoredTensor& stored,
    const StoredPiece& piece,
    const DcpPiece& found,
    const Box& common,
    const Block& local,
    char* memory) {
  const auto bytes = *tensor_bytes(piece.box.sizes, stored.dtype);
  block_.resize(std::max(block_.size(), static_cast<size_t>(bytes)));
  file(piece.file).read(found.offset, block_.data(), bytes);
  auto from = at::from_blob(block_.data(), piece.box.sizes, found.strides, stored.dtype);
  auto to = at::from_blob(memory, local.sizes, stored.dtype);
  for (size_t i = 0; i < common.sizes.size(); ++i) {
    const auto dim = static_cast<int64_t>(i);
    from = from.narrow(dim, common.offsets[i] - piece.box.offsets[i], common.sizes[i]);
    to = to.narrow(dim, common.offsets[i] - local.origin[i], common.sizes[i]);
  }
  to.copy_(from);
}

void Reader::check(const StoredTensor& stored, const LocalTensor& target) {
  visit(stored, target, verify_, nullptr);
}

at::Tensor Reader::read(const StoredTensor& stored, const LocalTensor& target) {
  auto result = at::empty(target.local.sizes(), at::device(at::kCPU).dtype(stored.dtype));
  visit(stored, target, verify_, static_cast<char*>(result.mutable_data_ptr()));
  return result;
}

void Reader::read_checked(const StoredTensor& stored, const LocalTensor& target, void* memory) {
  visit(stored, target, /*verify=*/false, static_cast<char*>(memory));
}

void Reader::visit(
    const StoredTensor& stored, const LocalTensor& target, bool verify, char* memory) {
  const auto local_sizes = target.local.sizes().vec();
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(stored.dtype));
  std::vector<Copy> copies; // of one block
  for (const auto& [box, at] : target.boxes) {
    Block local{box.offsets, local_sizes};
    for (size_t dim = 0; dim < at.size(); ++dim) {
      local.origin[dim] -= at[dim];
    }
    for (const auto& piece : stored.pieces) {
      const auto common = intersection(box, piece.box);
      if (!common) {
        continue;
      }
      const auto* plain = &piece;
      StoredPiece in_archive;
      if (piece.archive_bytes > 0) {
        const auto& found = open_archive(stored, piece, verify);
        if (!found.strides.empty()) {
          if (memory) {
            copy_strided(stored, piece, found, *common, local, memory);
          }
          continue;
        }
        in_archive = {piece.file, found.offset, piece.box, {}};
        plain = &in_archive;
      }
      const bool check = verify && !plain->crcs.empty();
      const auto flush = [&] {
        if (!copies.empty()) {
          read_block(stored, *plain, copies, check, memory);
          copies.clear();
        }
      };
      for_each_run(*common, {piece.box.offsets, piece.box.sizes}, local, [&](const CopyRun& run) {
        Copy left{run.from * element_bytes, run.to * element_bytes, run.length * element_bytes};
        while (left.bytes > 0) { // one block at a time
          const auto number = left.from / kBlockBytes;
          const bool far = !copies.empty() && !check &&
                           left.from - (copies.back().from + copies.back().bytes) > kMaxGap;
          if (far || (!copies.empty() && copies[0].from / kBlockBytes != number)) {
            flush();
          }
          const auto bytes = std::min(left.bytes, (number + 1) * kBlockBytes - left.from);
          copies.push_back({left.from, left.to, bytes});
          left = {left.from + bytes, left.to + bytes, left.bytes - bytes};
        }
      });
      flush();
    }
  }
}

} // namespace fsdp::detail
