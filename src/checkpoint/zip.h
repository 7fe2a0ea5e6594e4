#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "base/files.h"

namespace fsdp::detail {

/// A file in a zip archive.
struct ZipRecord {
  std::string name; // without the archive's own folder, "data/0" for example
  int64_t header = 0;
  int64_t bytes = 0;
  uint32_t crc = 0;     // CRC-32; 0 if torch.save was told to compute none
  bool is_plain = true; // neither compressed nor encrypted
};

/// A zip archive that lies somewhere in a file, as torch.save writes it. The file must outlive it.
class ZipArchive {
 public:
  /// Reads the list of its records. Throws a CheckpointError that begins with `where` if the bytes
  /// are not an archive.
  ZipArchive(const File& file, int64_t begin, int64_t bytes, std::string where);

  /// By name.
  const std::map<std::string, ZipRecord>& records() const {
    return records_;
  }
  /// Returns null if there is none.
  const ZipRecord* find(const std::string& name) const;
  /// Throws CheckpointError if there is none.
  const ZipRecord& at(const std::string& name) const;
  /// Returns where in the file the record's data begin.
  int64_t data_offset(const ZipRecord& record) const;
  /// Returns the data. Throws CheckpointError unless they are at most `limit` bytes and have their
  /// checksum.
  std::string read(const ZipRecord& record, int64_t limit) const;

 private:
  void read_records(std::string_view directory, uint64_t count);
  std::string read_bytes(uint64_t offset, uint64_t size) const;

  const File& file_;
  const int64_t begin_;
  const int64_t size_;
  const std::string where_;
  // The ends of the archive. They have all but large tensors.
  std::string head_;
  std::string tail_;
  std::map<std::string, ZipRecord> records_;
};

/// Returns the CRC-32 of bytes of a file.
uint32_t file_crc32(const File& file, int64_t offset, int64_t bytes);

} // namespace fsdp::detail
