#include "checkpoint/zip.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/text.h"
#include "checkpoint/crc32c.h"

namespace fsdp::detail {

namespace {

// All numbers in a zip archive are little-endian. Where a number of 4 bytes is all ones, the real
// one has 8 bytes and lies elsewhere.
constexpr uint64_t kLocalSignature = 0x04034b50;
constexpr uint64_t kLocalBytes = 30;
constexpr uint64_t kEntrySignature = 0x02014b50;
constexpr uint64_t kEntryBytes = 46;
constexpr uint64_t kEndSignature = 0x06054b50;
constexpr uint64_t kEndBytes = 22;
constexpr uint64_t kLocator64Signature = 0x07064b50;
constexpr uint64_t kLocator64Bytes = 20;
constexpr uint64_t kEnd64Signature = 0x06064b50;
constexpr uint64_t kEnd64Bytes = 56;
constexpr uint64_t kExtra64 = 1;
constexpr uint64_t kElsewhere = 0xffffffff;
constexpr int64_t kMaxDirectoryBytes = int64_t{64} << 20;
constexpr int64_t kWindowBytes = 4096;

uint64_t number_at(std::string_view bytes, size_t offset, size_t count) {
  return little_endian(bytes.substr(offset, count));
}

/// Replaces numbers that lie elsewhere by those in the entry's extra fields. Returns false if they
/// are not there.
bool fill_from_extra(std::string_view extra, const std::vector<uint64_t*>& numbers) {
  std::string_view wide;
  while (extra.size() >= 4) {
    const auto size = number_at(extra, 2, 2);
    if (size > extra.size() - 4) {
      break;
    }
    if (number_at(extra, 0, 2) == kExtra64) {
      wide = extra.substr(4, size);
    }
    extra.remove_prefix(4 + size);
  }
  for (auto* number : numbers) {
    if (*number == kElsewhere) {
      if (wide.size() < 8) {
        return false;
      }
      *number = number_at(wide, 0, 8);
      wide.remove_prefix(8);
    }
  }
  return true;
}

} // namespace

uint32_t file_crc32(const File& file, int64_t offset, int64_t bytes) {
  constexpr int64_t kStep = int64_t{1} << 20;
  std::vector<char> block(static_cast<size_t>(std::min(bytes, kStep)));
  uint32_t crc = 0;
  for (int64_t done = 0; done < bytes; done += kStep) {
    const auto size = std::min(kStep, bytes - done);
    file.read(offset + done, block.data(), size);
    crc = crc32(block.data(), static_cast<size_t>(size), crc);
  }
  return crc;
}

ZipArchive::ZipArchive(const File& file, int64_t begin, int64_t bytes, std::string where)
    : file_(file), begin_(begin), size_(bytes), where_(std::move(where)) {
  const auto file_bytes = file_.size();
  FSDP_CHECK_AS(
      CheckpointError,
      begin >= 0 && bytes >= 0 && begin <= file_bytes && bytes <= file_bytes - begin, where_,
      ": needs ", bytes, " bytes from byte ", begin, " on, but the file has ", file_bytes,
      ": the file is truncated");
  const auto head_bytes = std::min(bytes, kWindowBytes);
  const auto tail_bytes = std::min(bytes - head_bytes, kWindowBytes);
  head_.resize(static_cast<size_t>(head_bytes));
  tail_.resize(static_cast<size_t>(tail_bytes));
  file_.read(begin_, head_.data(), head_bytes);
  file_.read(begin_ + size_ - tail_bytes, tail_.data(), tail_bytes);

  const auto all = static_cast<uint64_t>(size_);
  std::string end = all >= kEndBytes ? read_bytes(all - kEndBytes, kEndBytes) : "";
  FSDP_CHECK_AS(
      CheckpointError,
      !end.empty() && number_at(end, 0, 4) == kEndSignature && number_at(head_, 0, 2) == 0x4b50,
      where_, ": is not an archive of torch.save: it is damaged, or stored in another format");
  auto count = number_at(end, 10, 2);
  auto directory_bytes = number_at(end, 12, 4);
  auto directory = number_at(end, 16, 4);
  if (all >= kEndBytes + kLocator64Bytes) {
    const auto locator = read_bytes(all - kEndBytes - kLocator64Bytes, kLocator64Bytes);
    if (number_at(locator, 0, 4) == kLocator64Signature) {
      end = read_bytes(number_at(locator, 8, 8), kEnd64Bytes);
      FSDP_CHECK_AS(
          CheckpointError, number_at(end, 0, 4) == kEnd64Signature, where_,
          ": the end of its archive is damaged");
      count = number_at(end, 32, 8);
      directory_bytes = number_at(end, 40, 8);
      directory = number_at(end, 48, 8);
    }
  }
  FSDP_CHECK_AS(
      CheckpointError, directory_bytes <= static_cast<uint64_t>(kMaxDirectoryBytes), where_,
      ": its archive has too many records");
  read_records(read_bytes(directory, directory_bytes), count);
}

void ZipArchive::read_records(std::string_view directory, uint64_t count) {
  const auto check = [&](bool good) {
    FSDP_CHECK_AS(CheckpointError, good, where_, ": the list of its archive's records is damaged");
  };
  check(count <= directory.size() / kEntryBytes);
  for (uint64_t i = 0; i < count; ++i) {
    check(directory.size() >= kEntryBytes && number_at(directory, 0, 4) == kEntrySignature);
    const auto flags = number_at(directory, 8, 2);
    const auto method = number_at(directory, 10, 2);
    auto stored_bytes = number_at(directory, 20, 4);
    auto bytes = number_at(directory, 24, 4);
    const auto name_bytes = number_at(directory, 28, 2);
    const auto extra_bytes = number_at(directory, 30, 2);
    const auto comment_bytes = number_at(directory, 32, 2);
    auto header = number_at(directory, 42, 4);
    ZipRecord record;
    record.crc = static_cast<uint32_t>(number_at(directory, 16, 4));
    record.is_plain = method == 0 && (flags & 1) == 0;
    directory.remove_prefix(kEntryBytes);
    check(name_bytes + extra_bytes + comment_bytes <= directory.size());
    record.name = directory.substr(0, name_bytes);
    record.name.erase(0, record.name.find('/') + 1);
    check(fill_from_extra(
        directory.substr(name_bytes, extra_bytes), {&bytes, &stored_bytes, &header}));
    directory.remove_prefix(name_bytes + extra_bytes + comment_bytes);
    const auto all = static_cast<uint64_t>(size_);
    check(header <= all && (!record.is_plain || (bytes == stored_bytes && bytes <= all)));
    record.bytes = static_cast<int64_t>(bytes);
    record.header = static_cast<int64_t>(header);
    const auto name = record.name;
    check(records_.emplace(name, std::move(record)).second);
  }
  check(directory.empty());
}

const ZipRecord* ZipArchive::find(const std::string& name) const {
  const auto found = records_.find(name);
  return found == records_.end() ? nullptr : &found->second;
}

const ZipRecord& ZipArchive::at(const std::string& name) const {
  const auto* record = find(name);
  FSDP_CHECK_AS(CheckpointError, record, where_, ": its archive has no record '", name, "'");
  return *record;
}

std::string ZipArchive::read_bytes(uint64_t offset, uint64_t size) const {
  const auto all = static_cast<uint64_t>(size_);
  FSDP_CHECK_AS(
      CheckpointError, offset <= all && size <= all - offset, where_,
      ": its archive is damaged: it names bytes outside of itself");
  if (offset + size <= head_.size()) {
    return head_.substr(offset, size);
  }
  if (const auto tail = all - tail_.size(); offset >= tail) {
    return tail_.substr(offset - tail, size);
  }
  std::string bytes(size, '\0');
  file_.read(begin_ + static_cast<int64_t>(offset), bytes.data(), static_cast<int64_t>(size));
  return bytes;
}

int64_t ZipArchive::data_offset(const ZipRecord& record) const {
  FSDP_CHECK_AS(
      CheckpointError, record.is_plain, where_, ": the record '", record.name,
      "' of its archive is compressed or encrypted, which torch.save does not do");
  const auto local = read_bytes(static_cast<uint64_t>(record.header), kLocalBytes);
  const auto data = static_cast<uint64_t>(record.header) + kLocalBytes + number_at(local, 26, 2) +
                    number_at(local, 28, 2);
  const auto all = static_cast<uint64_t>(size_);
  FSDP_CHECK_AS(
      CheckpointError,
      number_at(local, 0, 4) == kLocalSignature && data <= all &&
          static_cast<uint64_t>(record.bytes) <= all - data,
      where_, ": the record '", record.name, "' of its archive is damaged");
  return begin_ + static_cast<int64_t>(data);
}

std::string ZipArchive::read(const ZipRecord& record, int64_t limit) const {
  FSDP_CHECK_AS(
      CheckpointError, record.bytes <= limit, where_, ": the record '", record.name, "' has ",
      record.bytes, " bytes, more than ", limit);
  auto data = read_bytes(
      static_cast<uint64_t>(data_offset(record) - begin_), static_cast<uint64_t>(record.bytes));
  FSDP_CHECK_AS(
      CheckpointError, record.crc == 0 || crc32(data.data(), data.size()) == record.crc, where_,
      ": the record '", record.name, "' is damaged: it does not match its checksum");
  return data;
}

} // namespace fsdp::detail
