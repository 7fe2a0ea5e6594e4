#include "checkpoint/dcp.h"

#include <ATen/TensorGeometry.h>
#include <c10/core/Contiguity.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/text.h"
#include "checkpoint/json_text.h"
#include "checkpoint/pickle.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/zip.h"

namespace fsdp::detail {

namespace {

using Kind = Pickle::Kind;

/// The description of a tensor in an archive has a few hundred bytes.
constexpr int64_t kMaxTensorPickle = int64_t{1} << 20;

struct TorchDtype {
  at::ScalarType dtype;
  const char* name;    // torch.NAME
  const char* storage; // torch.STORAGE; empty if torch.save names the dtype itself
};
constexpr std::array<TorchDtype, 20> kTorchDtypes{{
    {at::ScalarType::Double, "float64", "DoubleStorage"},
    {at::ScalarType::Float, "float32", "FloatStorage"},
    {at::ScalarType::Half, "float16", "HalfStorage"},
    {at::ScalarType::BFloat16, "bfloat16", "BFloat16Storage"},
    {at::ScalarType::Long, "int64", "LongStorage"},
    {at::ScalarType::Int, "int32", "IntStorage"},
    {at::ScalarType::Short, "int16", "ShortStorage"},
    {at::ScalarType::Char, "int8", "CharStorage"},
    {at::ScalarType::Byte, "uint8", "ByteStorage"},
    {at::ScalarType::Bool, "bool", "BoolStorage"},
    {at::ScalarType::ComplexFloat, "complex64", "ComplexFloatStorage"},
    {at::ScalarType::ComplexDouble, "complex128", "ComplexDoubleStorage"},
    {at::ScalarType::UInt16, "uint16", ""},
    {at::ScalarType::UInt32, "uint32", ""},
    {at::ScalarType::UInt64, "uint64", ""},
    {at::ScalarType::Float8_e4m3fn, "float8_e4m3fn", ""},
    {at::ScalarType::Float8_e5m2, "float8_e5m2", ""},
    {at::ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz", ""},
    {at::ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz", ""},
    {at::ScalarType::Float8_e8m0fnu, "float8_e8m0fnu", ""},
}};

/// `column` is that of the table above.
at::ScalarType torch_dtype(
    const PickleView& value, const char* const TorchDtype::* column, const std::string& where) {
  const auto name = value.is(Kind::Global) ? value.global() : "";
  for (const auto& known : kTorchDtypes) {
    const std::string known_name = known.*column;
    if (!known_name.empty() && name == "torch." + known_name) {
      return known.dtype;
    }
  }
  FSDP_THROW(
      CheckpointError, where, ": its dtype ", name.empty() ? "has no name" : "'" + name + "'",
      name.empty() ? "" : " is not known");
}

// ------------------------------------------------------------ .metadata

/// Returns a field of an object, which is in its state.
PickleView field(const PickleView& object, const char* name, const std::string& where) {
  const auto state = object.is(Kind::Object) ? object.state() : std::nullopt;
  const auto found = state ? state->find(name) : std::nullopt;
  FSDP_CHECK_AS(CheckpointError, found, where, ": '", name, "' is missing");
  return *found;
}

PickleView checked(PickleView value, Kind kind, const char* what, const std::string& where) {
  FSDP_CHECK_AS(CheckpointError, value.is(kind), where, ": '", what, "' has the wrong type");
  return value;
}

int64_t size_of(const PickleView& value, const char* what, const std::string& where) {
  FSDP_CHECK_AS(
      CheckpointError, value.is(Kind::Int) && value.integer() >= 0, where, ": '", what,
      "' is not a size");
  return value.integer();
}

/// Returns the numbers of a tuple or a torch.Size.
std::vector<int64_t> sizes_of(PickleView value, const char* what, const std::string& where) {
  if (value.is(Kind::Object) && value.global() == "torch.Size" && value.arguments().size() == 1) {
    value = value.arguments()[0];
  }
  checked(value, Kind::Tuple, what, where);
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < value.size(); ++i) {
    sizes.push_back(size_of(value[i], what, where));
  }
  check_dims(sizes, where);
  return sizes;
}

/// The part of a file that is an archive.
struct DcpItem {
  std::string file;
  int64_t offset = 0;
  int64_t bytes = 0;
};

/// By name and by offset in the whole tensor, which is empty for other objects.
using DcpItems = std::map<std::pair<std::string, std::vector<int64_t>>, DcpItem>;

bool is_none(const std::optional<PickleView>& value) {
  return !value || value->is(Kind::None);
}

DcpItem parse_item(const PickleView& info, const std::string& where) {
  DcpItem item;
  item.file =
      checked(field(info, "relative_path", where), Kind::Text, "relative_path", where).text();
  FSDP_CHECK_AS(
      CheckpointError, is_file_name(item.file) && is_utf8(item.file), where,
      ": its relative_path is not the name of a file in this folder");
  item.offset = size_of(field(info, "offset", where), "offset", where);
  item.bytes = size_of(field(info, "length", where), "length", where);
  int64_t end = 0;
  FSDP_CHECK_AS(
      CheckpointError, !__builtin_add_overflow(item.offset, item.bytes, &end), where,
      ": offset and length make more bytes than can be counted");
  const auto transforms = info.state()->find("transform_descriptors");
  FSDP_CHECK_AS(
      CheckpointError, is_none(transforms) || transforms->size() == 0, where,
      ": is stored compressed or otherwise transformed ('",
      transforms && transforms->size() > 0 ? (*transforms)[0].text() : "",
      "'), which this library does not read; save without extensions");
  return item;
}

DcpItems parse_items(const PickleView& storage, const std::string& file) {
  DcpItems items;
  checked(storage, Kind::Dict, "storage_data", file);
  for (size_t i = 0; i < storage.size(); i += 2) {
    const std::string name(checked(field(storage[i], "fqn", file), Kind::Text, "fqn", file).text());
    const auto where = c10::str(file, ", '", name, "'");
    const auto offset = storage[i].state()->find("offset");
    auto offsets = is_none(offset) ? std::vector<int64_t>() : sizes_of(*offset, "offset", where);
    FSDP_CHECK_AS(
        CheckpointError,
        items.emplace(std::pair(name, std::move(offsets)), parse_item(storage[i + 1], where))
            .second,
        where, ": the same part is stored twice");
  }
  return items;
}

StoredTensor parse_tensor(
    const std::string& name,
    const PickleView& value,
    const DcpItems& items,
    const std::string& where) {
  StoredTensor tensor;
  tensor.name = name;
  const auto properties = field(value, "properties", where);
  const auto state = properties.is(Kind::Object) ? properties.state() : std::nullopt;
  FSDP_CHECK_AS(
      CheckpointError, state && state->is(Kind::Tuple) && state->size() > 0, where,
      ": its properties are missing");
  tensor.dtype = torch_dtype((*state)[0], &TorchDtype::name, where);
  tensor.sizes = sizes_of(field(value, "size", where), "size", where);
  const auto whole = tensor_bytes(tensor.sizes, tensor.dtype);
  FSDP_CHECK_AS(CheckpointError, whole, where, ": its size has more elements than can be counted");
  const auto chunks = checked(field(value, "chunks", where), Kind::List, "chunks", where);
  for (size_t i = 0; i < chunks.size(); ++i) {
    StoredPiece piece;
    piece.box.offsets = sizes_of(field(chunks[i], "offsets", where), "offsets", where);
    piece.box.sizes = sizes_of(field(chunks[i], "sizes", where), "sizes", where);
    const auto bytes = tensor_bytes(piece.box.sizes, tensor.dtype);
    FSDP_CHECK_AS(
        CheckpointError, bytes && piece.box.sizes.size() == tensor.sizes.size(), where,
        ": a chunk has a wrong size");
    if (*bytes == 0) {
      continue; // a rank without a part of the tensor saves an empty one
    }
    const auto found = items.find({name, piece.box.offsets});
    FSDP_CHECK_AS(
        CheckpointError, found != items.end(), where, ": it does not say where the chunk at [",
        join(piece.box.offsets), "] lies");
    piece.file = found->second.file;
    piece.offset = found->second.offset;
    piece.archive_bytes = found->second.bytes;
    FSDP_CHECK_AS(
        CheckpointError, piece.archive_bytes > *bytes, where, ": the chunk at [",
        join(piece.box.offsets), "] has ", *bytes, " bytes, and its archive ", piece.archive_bytes,
        ": ", kDcpMetadataName, " is damaged, or the files are not in the format of torch.save");
    tensor.pieces.push_back(std::move(piece));
  }
  return tensor;
}

StoredObject parse_object(
    const std::string& name, const DcpItems& items, const std::string& where) {
  const auto found = items.find({name, {}});
  FSDP_CHECK_AS(
      CheckpointError, found != items.end(), where, ": it does not say where this object lies");
  return {name, "", found->second.file, found->second.offset, found->second.bytes};
}

// ------------------------------------------------------------ Archives

std::string where_of(const File& file, const StoredTensor& tensor) {
  return c10::str(file.path().string(), ", tensor '", tensor.name, "'");
}

/// A tensor as data.pkl describes it. Offset and strides count elements.
struct SavedTensor {
  at::ScalarType dtype = at::ScalarType::Float;
  std::string record;
  int64_t offset = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

SavedTensor parse_saved_tensor(const PickleView& root, const std::string& where) {
  const auto made_by = root.is(Kind::Object) ? root.global() : "";
  const bool names_dtype = made_by == "torch._utils._rebuild_tensor_v3";
  FSDP_CHECK_AS(
      CheckpointError, names_dtype || made_by == "torch._utils._rebuild_tensor_v2", where,
      ": the file does not have an ordinary tensor, but what '", made_by, "' makes");
  const auto arguments = root.arguments();
  const size_t num_arguments = names_dtype ? 7 : 6; // and a dict of bits, which most do not have
  FSDP_CHECK_AS(
      CheckpointError,
      arguments.is(Kind::Tuple) && arguments.size() >= num_arguments &&
          arguments[0].is(Kind::PersistentId) && arguments[0][0].is(Kind::Tuple) &&
          arguments[0][0].size() == 5,
      where, ": the description of the tensor is damaged");
  FSDP_CHECK_AS(
      CheckpointError, arguments.size() == num_arguments || arguments[num_arguments].size() == 0,
      where,
      ": was saved as a view that is conjugated or negative; save its "
      "resolve_conj().resolve_neg()");
  const auto storage = arguments[0][0]; // "storage", class, key, device, number of elements
  SavedTensor saved;
  saved.dtype = names_dtype ? torch_dtype(arguments[6], &TorchDtype::name, where)
                            : torch_dtype(storage[1], &TorchDtype::storage, where);
  saved.record = "data/" + std::string(checked(storage[2], Kind::Text, "storage", where).text());
  saved.offset = size_of(arguments[1], "storage_offset", where);
  saved.sizes = sizes_of(arguments[2], "size", where);
  saved.strides = sizes_of(arguments[3], "stride", where);
  FSDP_CHECK_AS(
      CheckpointError, saved.sizes.size() == saved.strides.size(), where,
      ": size and stride have different numbers of dims");
  return saved;
}

/// Returns the strides, or nothing if the elements are row-major.
std::vector<int64_t> strides_of(const SavedTensor& saved, const std::string& where) {
  if (at::geometry_is_contiguous(saved.sizes, saved.strides)) {
    return {};
  }
  FSDP_CHECK_AS(
      CheckpointError, c10::_compute_non_overlapping_and_dense<int64_t>(saved.sizes, saved.strides),
      where, ": was saved as a view with gaps or shared elements; save its contiguous()");
  return saved.strides;
}

} // namespace

Catalog read_dcp(const Path& folder) {
  const auto path = folder / kDcpMetadataName;
  const auto file = path.string();
  FSDP_CHECK_AS(
      CheckpointError, path_exists(path), folder.string(), " is incomplete: ", kDcpMetadataName,
      " is missing",
      path_exists(folder / "__0.metadata")
          ? "; its ranks were saved without collectives, which this library does not read"
          : ", which torch.distributed.checkpoint writes last");
  const Pickle pickle(read_text(path), file);
  const auto items = parse_items(field(pickle.root(), "storage_data", file), file);
  const auto entries = checked(
      field(pickle.root(), "state_dict_metadata", file), Kind::Dict, "state_dict_metadata", file);
  Catalog catalog;
  catalog.folder = folder;
  for (const auto& [key, item] : items) {
    auto& bytes = catalog.least_bytes[item.file];
    bytes = std::max(bytes, item.offset + item.bytes);
  }
  for (size_t i = 0; i < entries.size(); i += 2) {
    const std::string name(checked(entries[i], Kind::Text, "fqn", file).text());
    FSDP_CHECK_AS(CheckpointError, is_utf8(name), file, ": a name is not UTF-8");
    const auto type = entries[i + 1].global();
    const auto where = c10::str(file, ", '", name, "'");
    if (type.ends_with(".TensorStorageMetadata")) {
      catalog.tensors.push_back(parse_tensor(name, entries[i + 1], items, where));
    } else if (type.ends_with(".BytesStorageMetadata")) {
      catalog.objects.push_back(parse_object(name, items, where));
    } else {
      FSDP_THROW(CheckpointError, where, ": has the unknown type '", type, "'");
    }
  }
  catalog.index(file);
  return catalog;
}

DcpPiece open_dcp_piece(const File& file, const StoredTensor& tensor, const StoredPiece& piece) {
  const auto where = where_of(file, tensor);
  const ZipArchive archive(file, piece.offset, piece.archive_bytes, where);
  const auto* order = archive.find("byteorder"); // older archives do not have it
  FSDP_CHECK_AS(
      CheckpointError, !order || archive.read(*order, kMaxTensorPickle) == "little", where,
      ": was saved on a machine with another order of bytes");
  const Pickle pickle(archive.read(archive.at("data.pkl"), kMaxTensorPickle), where);
  const auto saved = parse_saved_tensor(pickle.root(), where);
  FSDP_CHECK_AS(
      CheckpointError, saved.dtype == tensor.dtype && saved.sizes == piece.box.sizes, where,
      ": is ", c10::toString(saved.dtype), " [", join(saved.sizes), "] in the file, but ",
      c10::toString(tensor.dtype), " [", join(piece.box.sizes), "] in ", kDcpMetadataName);
  DcpPiece result;
  result.strides = strides_of(saved, where);
  const auto& record = archive.at(saved.record);
  result.record = archive.data_offset(record);
  result.record_bytes = record.bytes;
  if (record.crc != 0) {
    result.crc = record.crc;
  }
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(saved.dtype));
  const auto bytes = tensor_bytes(saved.sizes, saved.dtype).value();
  FSDP_CHECK_AS(
      CheckpointError,
      saved.offset <= record.bytes / element_bytes &&
          bytes <= record.bytes - saved.offset * element_bytes,
      where, ": needs ", bytes, " bytes, but its archive has ", record.bytes);
  result.offset = result.record + saved.offset * element_bytes;
  return result;
}

void check_dcp_piece(const File& file, const StoredTensor& tensor, const DcpPiece& piece) {
  FSDP_CHECK_AS(
      CheckpointError,
      !piece.crc || file_crc32(file, piece.record, piece.record_bytes) == *piece.crc,
      where_of(file, tensor), ": bytes ", piece.record, " to ", piece.record + piece.record_bytes,
      " are damaged: they do not match their checksum");
}

} // namespace fsdp::detail
