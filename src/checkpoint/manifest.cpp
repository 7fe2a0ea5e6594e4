#include "checkpoint/manifest.h"

#include <cmath>
#include <cstdio>
#include <exception>
#include <limits>

#include "base/check.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/json_text.h"
#include "checkpoint/safetensors.h"

namespace fsdp::detail {

namespace {

using nlohmann::json;

constexpr const char* kFormat = "fsdp.checkpoint";
constexpr int64_t kVersion = 1;

json value_json(const StoredValue& value) {
  return std::visit(
      [](const auto& held) -> json {
        if constexpr (std::is_same_v<std::decay_t<decltype(held)>, double>) {
          if (!std::isfinite(held)) { // JSON has neither NaN nor infinity
            return {{"double", std::isnan(held) ? "nan" : held > 0 ? "inf" : "-inf"}};
          }
        }
        return held;
      },
      value);
}

StoredValue parse_value(const JsonView& value, const std::string& where) {
  using Kind = JsonTape::Kind;
  if (value.is(Kind::Bool)) {
    return value.boolean();
  }
  if (value.is(Kind::Real)) {
    return value.real();
  }
  if (value.is(Kind::Size)) {
    return json_size(value, "value", where);
  }
  if (value.is(Kind::Negative)) {
    return value.negative();
  }
  if (value.is(Kind::Text)) {
    return value.text();
  }
  const auto& name = json_string(json_field(value, "double", where), "double", where);
  FSDP_CHECK_AS(
      CheckpointError, name == "nan" || name == "inf" || name == "-inf", where,
      ": not a value: ", name);
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  return name == "nan" ? std::numeric_limits<double>::quiet_NaN()
                       : (name == "inf" ? kInfinity : -kInfinity);
}

StoredPiece parse_piece(
    const JsonView& value, const StoredTensor& tensor, const std::string& where) {
  StoredPiece piece;
  piece.file = json_file_name(json_field(value, "file", where), "file", where);
  piece.offset = json_size(json_field(value, "offset", where), "offset", where);
  piece.box.offsets = json_sizes(json_field(value, "offsets", where), "offsets", where);
  piece.box.sizes = json_sizes(json_field(value, "sizes", where), "sizes", where);
  // Check the sizes first: the number of bytes is computed from them below.
  FSDP_CHECK_AS(
      CheckpointError,
      piece.box.sizes.size() == tensor.sizes.size() && tensor_bytes(piece.box.sizes, tensor.dtype),
      where, ": a piece has a wrong shape");
  for (const auto crc : json_sizes(json_field(value, "crc32c", where), "crc32c", where)) {
    FSDP_CHECK_AS(
        CheckpointError, crc <= std::numeric_limits<uint32_t>::max(), where,
        ": a checksum is too large");
    piece.crcs.push_back(static_cast<uint32_t>(crc));
  }
  const auto bytes = *tensor_bytes(piece.box.sizes, tensor.dtype);
  FSDP_CHECK_AS(
      CheckpointError,
      piece.crcs.empty() || static_cast<int64_t>(piece.crcs.size()) ==
                                bytes / kBlockBytes + (bytes % kBlockBytes != 0),
      where, ": ", piece.crcs.size(), " checksums for ", bytes, " bytes");
  return piece;
}

json values_json(const StoredValues& values) {
  auto list = json::array();
  for (const auto& [name, value] : values) {
    list.push_back(json::array({name, value_json(value)}));
  }
  return list;
}

StoredValues::value_type parse_named_value(const JsonView& pair, const std::string& file) {
  std::vector<JsonView> parts;
  for (const auto part : json_list(pair, "value", file)) {
    parts.push_back(part);
  }
  FSDP_CHECK_AS(CheckpointError, parts.size() == 2, file, ": a value is not a name and a value");
  const auto& name = json_string(parts[0], "name", file);
  return {name, parse_value(parts[1], file + ", value '" + name + "'")};
}

StoredTensor parse_tensor(const JsonView& value, const std::string& file) {
  StoredTensor tensor;
  tensor.name = json_string(json_field(value, "name", file), "name", file);
  const auto where = file + ", tensor '" + tensor.name + "'";
  tensor.dtype = dtype_of(json_string(json_field(value, "dtype", where), "dtype", where), where);
  tensor.sizes = json_sizes(json_field(value, "shape", where), "shape", where);
  check_dims(tensor.sizes, where);
  FSDP_CHECK_AS(
      CheckpointError, tensor_bytes(tensor.sizes, tensor.dtype), where,
      ": its shape has more elements than can be counted");
  for (const auto piece : json_list(json_field(value, "pieces", where), "pieces", where)) {
    tensor.pieces.push_back(parse_piece(piece, tensor, where));
  }
  return tensor;
}

} // namespace

std::string manifest_checksum(std::string_view rest) {
  char text[32];
  std::snprintf(text, sizeof(text), "{\"crc32c\":\"%08x\",", crc32c(rest.data(), rest.size()));
  return text;
}

std::string manifest_text(const Catalog& catalog, const std::string& file) {
  auto tensors = json::array();
  for (const auto& tensor : catalog.tensors) {
    auto pieces = json::array();
    for (const auto& piece : tensor.pieces) {
      pieces.push_back(
          {{"file", piece.file},
           {"offset", piece.offset},
           {"offsets", piece.box.offsets},
           {"sizes", piece.box.sizes},
           {"crc32c", piece.crcs}});
    }
    tensors.push_back(
        {{"name", tensor.name},
         {"dtype", dtype_name(tensor.dtype, c10::str(file, ", tensor '", tensor.name, "'"))},
         {"shape", tensor.sizes},
         {"pieces", std::move(pieces)}});
  }
  const auto body = json_text(
      {{"format", kFormat},
       {"version", kVersion},
       {"id", catalog.id},
       {"time", catalog.time},
       {"block_bytes", kBlockBytes},
       {"tensors", std::move(tensors)},
       {"values", values_json(catalog.values)}},
      file);
  return manifest_checksum(std::string_view(body).substr(1)) + body.substr(1);
}

std::string values_text(const StoredValues& values, const std::string& file) {
  return json_text(values_json(values), file);
}

StoredValues parse_values(std::string_view text, const std::string& file) {
  StoredValues values;
  const auto tape = parse_json(text, file);
  for (const auto pair : json_list(tape.root(), "values", file)) {
    values.push_back(parse_named_value(pair, file));
  }
  return values;
}

Catalog read_manifest(const Path& path) {
  const auto text = read_text(path);
  const auto length = manifest_checksum("").size();
  FSDP_CHECK_AS(
      CheckpointError,
      text.size() > length &&
          text.compare(0, length, manifest_checksum(std::string_view(text).substr(length))) == 0,
      path.string(), ": is damaged: it does not match its checksum");
  return parse_manifest(text, path.string());
}

Catalog parse_manifest(std::string_view text, const std::string& file) {
  Catalog catalog;
  std::exception_ptr wrong; // thrown later: if the version is wrong, too, then that is the reason
  const auto take = [&](const std::string& key, const JsonView& item) {
    try {
      if (key == "tensors" && !wrong) {
        catalog.tensors.push_back(parse_tensor(item, file));
      } else if (key == "values" && !wrong) {
        catalog.values.push_back(parse_named_value(item, file));
      }
    } catch (const CheckpointError&) {
      wrong = std::current_exception();
    }
  };
  const auto tape = parse_json(text, file, /*depth=*/2, take);
  const auto parsed = tape.root();
  FSDP_CHECK_AS(
      CheckpointError, json_string(json_field(parsed, "format", file), "format", file) == kFormat,
      file, ": is not the manifest of a checkpoint");
  const auto version = json_size(json_field(parsed, "version", file), "version", file);
  FSDP_CHECK_AS(
      CheckpointError, version == kVersion, file, ": has version ", version,
      "; this library reads version ", kVersion);
  FSDP_CHECK_AS(
      CheckpointError,
      json_size(json_field(parsed, "block_bytes", file), "block_bytes", file) == kBlockBytes, file,
      ": unknown size of checksummed blocks");
  catalog.id = json_string(json_field(parsed, "id", file), "id", file);
  catalog.time = json_size(json_field(parsed, "time", file), "time", file);
  for (const auto* key : {"tensors", "values"}) {
    json_list(json_field(parsed, key, file), key, file);
  }
  if (wrong) {
    std::rethrow_exception(wrong);
  }
  catalog.index(file);
  return catalog;
}

} // namespace fsdp::detail
