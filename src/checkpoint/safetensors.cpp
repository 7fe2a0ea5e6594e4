#include "checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/text.h"
#include "checkpoint/json_text.h"

namespace fsdp::detail {

namespace {

using nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000; // the limit of the reference implementation
constexpr int64_t kAlignment = 8;
constexpr const char* kMetadata = "__metadata__";

constexpr std::array<std::pair<const char*, at::ScalarType>, 19> kDtypes{{
    {"F64", at::ScalarType::Double},
    {"F32", at::ScalarType::Float},
    {"F16", at::ScalarType::Half},
    {"BF16", at::ScalarType::BFloat16},
    {"I64", at::ScalarType::Long},
    {"I32", at::ScalarType::Int},
    {"I16", at::ScalarType::Short},
    {"I8", at::ScalarType::Char},
    {"U8", at::ScalarType::Byte},
    {"BOOL", at::ScalarType::Bool},
    {"F8_E4M3", at::ScalarType::Float8_e4m3fn},
    {"F8_E5M2", at::ScalarType::Float8_e5m2},
    {"F8_E4M3FNUZ", at::ScalarType::Float8_e4m3fnuz},
    {"F8_E5M2FNUZ", at::ScalarType::Float8_e5m2fnuz},
    {"F8_E8M0", at::ScalarType::Float8_e8m0fnu},
    {"U16", at::ScalarType::UInt16},
    {"U32", at::ScalarType::UInt32},
    {"U64", at::ScalarType::UInt64},
    {"C64", at::ScalarType::ComplexFloat},
}};

SafetensorsEntry parse_entry(
    const std::string& name, const JsonView& value, int64_t data_offset, const std::string& file) {
  const auto where = file + ", tensor '" + name + "'";
  SafetensorsEntry entry{.name = name};
  entry.dtype = dtype_of(json_string(json_field(value, "dtype", where), "dtype", where), where);
  entry.sizes = json_sizes(json_field(value, "shape", where), "shape", where);
  check_dims(entry.sizes, where);
  const auto offsets = json_sizes(json_field(value, "data_offsets", where), "data_offsets", where);
  const auto bytes = tensor_bytes(entry.sizes, entry.dtype);
  FSDP_CHECK_AS(CheckpointError, bytes, where, ": its shape has more elements than can be counted");
  FSDP_CHECK_AS(
      CheckpointError, offsets.size() == 2 && offsets[0] <= offsets[1], where,
      ": data_offsets are not a begin and an end");
  FSDP_CHECK_AS(
      CheckpointError, offsets[1] - offsets[0] == *bytes, where, ": shape and dtype need ", *bytes,
      " bytes, data_offsets give ", offsets[1] - offsets[0]);
  FSDP_CHECK_AS(
      CheckpointError, offsets[0] <= std::numeric_limits<int64_t>::max() - data_offset, where,
      ": data_offsets lie outside of the file");
  entry.offset = data_offset + offsets[0];
  return entry;
}

} // namespace

std::optional<std::string> find_dtype_name(at::ScalarType dtype) {
  for (const auto& [name, type] : kDtypes) {
    if (type == dtype) {
      return name;
    }
  }
  return std::nullopt;
}

std::string dtype_name(at::ScalarType dtype, const std::string& where) {
  if (auto name = find_dtype_name(dtype)) {
    return *name;
  }
  FSDP_THROW(CheckpointError, where, ": safetensors files cannot hold ", dtype);
}

at::ScalarType dtype_of(const std::string& name, const std::string& where) {
  for (const auto& [known, type] : kDtypes) {
    if (name == known) {
      return type;
    }
  }
  FSDP_THROW(CheckpointError, where, ": unknown dtype '", name, "'");
}

void check_dims(const std::vector<int64_t>& sizes, const std::string& where) {
  FSDP_CHECK_AS(
      CheckpointError, sizes.size() <= kMaxDims, where, ": has ", sizes.size(), " dims, more than ",
      kMaxDims);
}

std::optional<int64_t> tensor_bytes(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  // Even if one size is 0, the product of the others must not overflow: strides are computed from
  // them.
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  bool empty = false;
  for (const auto size : sizes) {
    empty = empty || size == 0;
    if (size < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : bytes;
}

int64_t SafetensorsEntry::bytes() const {
  return tensor_bytes(sizes, dtype).value();
}

int64_t safetensors_data_offset(
    std::string_view first_bytes, int64_t file_bytes, const std::string& file) {
  FSDP_CHECK_AS(
      CheckpointError, first_bytes.size() >= kLengthBytes && file_bytes >= kLengthBytes, file,
      " has ", file_bytes, " bytes: too few for a safetensors file");
  const auto length = little_endian(first_bytes.substr(0, kLengthBytes));
  FSDP_CHECK_AS(
      CheckpointError, length <= kMaxHeaderBytes, file, " says that its header has ", length,
      " bytes: it is not a safetensors file, or broken");
  const auto header_bytes = static_cast<int64_t>(length);
  FSDP_CHECK_AS(
      CheckpointError, header_bytes <= file_bytes - kLengthBytes, file,
      " says that its header has ", header_bytes, " bytes, but the file has ", file_bytes,
      ": it is truncated or broken");
  return kLengthBytes + header_bytes;
}

SafetensorsHeader parse_safetensors(
    std::string_view start, int64_t file_bytes, const std::string& file) {
  const auto data_offset = safetensors_data_offset(start, file_bytes, file);
  FSDP_CHECK_AS(
      CheckpointError, static_cast<int64_t>(start.size()) >= data_offset, file,
      ": its header is not there");
  SafetensorsHeader header;
  const auto take = [&](const std::string& name, const JsonView& value) {
    if (name == kMetadata) {
      for (const auto item : json_members(value, kMetadata, file)) {
        header.metadata[item.name()] = json_string(item, item.name().c_str(), file);
      }
    } else {
      header.entries.push_back(parse_entry(name, value, data_offset, file));
    }
  };
  const auto text = start.substr(kLengthBytes, static_cast<size_t>(data_offset - kLengthBytes));
  const auto tape = parse_json(text, file, /*depth=*/1, take);
  FSDP_CHECK_AS(
      CheckpointError, tape.root().is(JsonTape::Kind::Object), file,
      ": its header is not a JSON object");
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.bytes() < b.bytes();
  });
  int64_t end = data_offset;
  for (const auto& entry : header.entries) {
    FSDP_CHECK_AS(
        CheckpointError, entry.offset == end, file, ", tensor '", entry.name, "': begins at byte ",
        entry.offset, " instead of ", end, ": tensors overlap, or there is a gap");
    FSDP_CHECK_AS(
        CheckpointError, entry.bytes() <= file_bytes - end, file, ", tensor '", entry.name,
        "': ends ", entry.bytes() - (file_bytes - end),
        " bytes behind the file's end: the file "
        "is truncated");
    end += entry.bytes();
  }
  FSDP_CHECK_AS(
      CheckpointError, end == file_bytes, file, ": ", file_bytes - end,
      " bytes at its end belong to no tensor");
  return header;
}

SafetensorsHeader read_safetensors(const File& file) {
  const auto name = file.path().string();
  const auto file_bytes = file.size();
  std::string start(static_cast<size_t>(std::min(file_bytes, kLengthBytes)), '\0');
  file.read(0, start.data(), static_cast<int64_t>(start.size()));
  start.resize(static_cast<size_t>(safetensors_data_offset(start, file_bytes, name)));
  file.read(0, start.data(), static_cast<int64_t>(start.size()));
  return parse_safetensors(start, file_bytes, name);
}

std::string layout_safetensors(SafetensorsHeader& header, const std::string& file) {
  // There may be no gaps, so tensors that need the largest alignment come first.
  std::stable_sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return c10::elementSize(a.dtype) > c10::elementSize(b.dtype);
  });
  auto object = json::object();
  if (!header.metadata.empty()) {
    object[kMetadata] = header.metadata;
  }
  int64_t end = 0;
  for (auto& entry : header.entries) {
    const auto where = file + ", tensor '" + entry.name + "'";
    check_dims(entry.sizes, where);
    entry.offset = end;
    FSDP_CHECK_AS(
        CheckpointError, !__builtin_add_overflow(end, entry.bytes(), &end), where, ": too large");
    FSDP_CHECK_AS(
        CheckpointError, entry.name != kMetadata && !object.contains(entry.name), where,
        ": this name cannot be used, or occurs twice");
    object[entry.name] = {
        {"dtype", dtype_name(entry.dtype, where)},
        {"shape", entry.sizes},
        {"data_offsets", {entry.offset, end}}};
  }
  auto text = json_text(object, file);
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  FSDP_CHECK_AS(
      CheckpointError, text.size() <= kMaxHeaderBytes, file, ": too many tensors for one file");
  std::string start;
  for (int64_t i = 0; i < kLengthBytes; ++i) {
    start.push_back(static_cast<char>(text.size() >> (8 * i) & 0xff));
  }
  start += text;
  for (auto& entry : header.entries) {
    entry.offset += static_cast<int64_t>(start.size());
  }
  return start;
}

} // namespace fsdp::detail
