#pragma once

// Inputs for what reads checkpoints, and how they are read: for libFuzzer and the suite.

#include <ATen/ATen.h>

#include <fsdp/checkpoint_tools.h>
#include <fsdp/error.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/catalog.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/dcp.h"
#include "checkpoint/json_text.h"
#include "checkpoint/manifest.h"
#include "checkpoint/reader.h"
#include "fuzz/dcp_inputs.h"
#include "fuzz/input.h"

namespace fsdp::test {

/// As a safetensors file begins.
inline std::string with_length(uint64_t length, std::string_view rest) {
  std::string text;
  for (int i = 0; i < 8; ++i) {
    text.push_back(static_cast<char>(length >> (8 * i) & 0xff));
  }
  return text.append(rest);
}
/// One with this header, and so many bytes behind it.
inline std::string safetensors_file(std::string_view header, size_t data_bytes) {
  return with_length(header.size(), header) + std::string(data_bytes, 'x');
}

// ------------------------------------------------------------ Good ones

inline const std::string kGoodHeader =
    R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[5],"data_offsets":[0,20]},)"
    R"("b":{"dtype":"I16","shape":[2],"data_offsets":[20,24]}})";
inline const std::string kGoodIndex =
    R"({"metadata":{"total_size":24},)"
    R"("weight_map":{"a":"good.safetensors","b":"good.safetensors"}})";

/// Of a part of w with this DCP_SHARDING_INFO.
inline std::string shard_of_w(
    const std::string& info,
    const std::string& dtype = "F32",
    const std::string& shape = "[2,3]",
    const std::string& offsets = "[0,24]") {
  return R"({"__metadata__":{"DCP_SHARDING_INFO":)" + nlohmann::json(info).dump() +
         R"(},"w":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}
/// Rows from `row` on.
inline std::string rows_of_w(int row) {
  return shard_of_w(R"({"w":{"saved_offsets":[)" + std::to_string(row) + ",0]}}");
}

inline std::string good_manifest() {
  const std::string data(kFuzzDataBytes, 'x');
  const auto crc = detail::crc32c(data.data(), data.size());
  const auto offset = static_cast<int64_t>(safetensors_file(rows_of_w(0), 0).size());
  detail::Catalog catalog;
  catalog.tensors = {
      {"w",
       at::kFloat,
       {4, 3},
       {{"0.safetensors", offset, {{0, 0}, {2, 3}}, {crc}},
        {"1.safetensors", offset, {{2, 0}, {2, 3}}, {crc}}}}};
  catalog.values = {{"step", int64_t{3}}, {"lr", 0.5}, {"name", std::string("x")}};
  return "{" + detail::manifest_text(catalog, "good").substr(detail::manifest_checksum("").size());
}

// ------------------------------------------------------------ Reading

/// Reads inputs as parts of checkpoints, in folders below `root`.
class FuzzReader {
 public:
  explicit FuzzReader(detail::Path root) : root_(std::move(root)) {
    for (int kind = 0; kind < static_cast<int>(FuzzKind::count); ++kind) {
      detail::make_folders(folder(static_cast<FuzzKind>(kind)));
    }
    const auto first = safetensors_file(rows_of_w(0), kFuzzDataBytes);
    put(folder(FuzzKind::shard) / "0.safetensors", first);
    put(folder(FuzzKind::manifest) / "0.safetensors", first);
    put(folder(FuzzKind::manifest) / "1.safetensors",
        safetensors_file(rows_of_w(2), kFuzzDataBytes));
    put(folder(FuzzKind::index) / "good.safetensors",
        safetensors_file(kGoodHeader, kFuzzDataBytes));
    for (const auto kind :
         {FuzzKind::dcp_metadata, FuzzKind::dcp_archive, FuzzKind::dcp_tensor,
          FuzzKind::dcp_object}) {
      put(folder(kind) / detail::kDcpMetadataName, good_dcp().bytes());
      put(folder(kind) / "0.distcp", kGoodTensorArchive);
      put(folder(kind) / "1.distcp", kGoodTensorArchive);
      put(folder(kind) / "2.distcp", kGoodObjectArchive);
    }
  }

  /// All of it; false where it is refused. What this throws is a bug.
  bool read(FuzzKind kind, std::string_view bytes) const {
    put_input(kind, bytes);
    try {
      (void)verify_checkpoint(folder(kind));
      const auto catalog = detail::open_catalog(folder(kind));
      detail::Reader reader(catalog, /*verify=*/true);
      for (const auto& tensor : catalog.tensors) {
        const auto whole = detail::Box::whole(tensor.sizes);
        const auto meta = at::empty(tensor.sizes, at::device(at::kMeta));
        (void)reader.read(tensor, {meta, tensor.sizes, {{whole, whole.offsets}}});
      }
      return true;
    } catch (const CheckpointError&) {
      return false;
    }
  }

 private:
  detail::Path folder(FuzzKind kind) const {
    return root_ / std::to_string(static_cast<int>(kind));
  }

  static void put(const detail::Path& path, std::string_view bytes) {
    const auto file = detail::File::create(path);
    file.resize(0);
    file.write(0, bytes.data(), static_cast<int64_t>(bytes.size()));
  }

  void put_input(FuzzKind kind, std::string_view bytes) const {
    switch (kind) {
      case FuzzKind::file:
        return put(folder(kind) / "0.safetensors", bytes);
      case FuzzKind::header:
        return put(folder(kind) / "0.safetensors", safetensors_file(bytes, kFuzzDataBytes));
      case FuzzKind::shard:
        return put(folder(kind) / "1.safetensors", safetensors_file(bytes, kFuzzDataBytes));
      case FuzzKind::index:
        return put(folder(kind) / "model.safetensors.index.json", bytes);
      case FuzzKind::dcp_metadata:
        return put(folder(kind) / detail::kDcpMetadataName, bytes);
      case FuzzKind::dcp_archive:
        return put_archive(kind, "1.distcp", bytes);
      case FuzzKind::dcp_tensor:
        return put_archive(kind, "1.distcp", tensor_archive(std::string(bytes), kFuzzDataBytes));
      case FuzzKind::dcp_object:
        return put_archive(kind, "2.distcp", object_archive(std::string(bytes)));
      default: // its { is part of the checksum's field
        const auto rest = bytes.substr(bytes.starts_with('{') ? 1 : 0);
        return put(
            folder(kind) / detail::kManifestName, detail::manifest_checksum(rest).append(rest));
    }
  }

  /// Also says in `.metadata` how long it is.
  void put_archive(FuzzKind kind, const std::string& name, std::string_view bytes) const {
    auto dcp = good_dcp();
    const auto size = static_cast<int64_t>(bytes.size());
    (name == "2.distcp" ? dcp.object_length : dcp.second_length) = size;
    put(folder(kind) / name, bytes);
    put(folder(kind) / detail::kDcpMetadataName, dcp.bytes());
  }

  const detail::Path root_;
};

// ------------------------------------------------------------ Corpus

/// The first `from` replaced.
inline std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  if (at == std::string::npos) {
    throw std::logic_error("there is no " + from + " in " + text);
  }
  return text.replace(at, from.size(), to);
}

/// What is wrong with any JSON, given a good one.
inline void add_broken_json(
    std::vector<FuzzInput>& all, FuzzKind kind, const std::string& good, const std::string& key) {
  const auto add = [&](const std::string& what, std::string bytes) {
    all.push_back({what, kind, std::move(bytes)});
  };
  std::string nested;
  for (int i = 0; i < 100'000; ++i) {
    nested += "{\"a\":";
  }
  add("nothing", "");
  add("blanks", "    ");
  add("a list", "[]");
  add("a list with it", "[" + good + "]");
  add("null", "null");
  add("a number", "7");
  add("a string", "\"" + key + "\"");
  add("no end", good.substr(0, good.size() - 1));
  add("half", good.substr(0, good.size() / 2));
  add("something behind", good + "}");
  add("a zero byte behind", good + std::string(1, '\0') + "x");
  add("lists, deep", std::string(100'000, '['));
  add("objects, deep", nested);
  add("deep below a key", replaced(good, "{", "{\"deep\":" + std::string(1000, '[') + ","));
  add("the same key twice", replaced(good, "{", "{\"x\":1,\"x\":1,"));
  add("no UTF-8", replaced(good, key, key + "\xff"));
  add("UTF-8 that is too long", replaced(good, key, key + "\xc0\x80"));
  add("half a surrogate", replaced(good, key, key + "\\ud800"));
  add("a number beyond all", replaced(good, "{", "{\"x\":1e999,"));
}

/// Fixed inputs of every kind, each to be read or to be refused.
inline std::vector<FuzzInput> fuzz_corpus() {
  std::vector<FuzzInput> all;
  const auto file = [&](const std::string& what, std::string bytes, bool good = false) {
    all.push_back({"file: " + what, FuzzKind::file, std::move(bytes), good});
  };
  const auto whole = safetensors_file(kGoodHeader, kFuzzDataBytes);
  file("good", whole, true);
  file("no tensors", safetensors_file("{}", 0), true);
  file("no bytes", "");
  file("7 bytes", whole.substr(0, 7));
  file("a length alone", whole.substr(0, 8));
  file("half a header", whole.substr(0, 40));
  file("no data", safetensors_file(kGoodHeader, 0));
  file("a byte less", safetensors_file(kGoodHeader, kFuzzDataBytes - 1));
  file("a byte more", safetensors_file(kGoodHeader, kFuzzDataBytes + 1));
  for (const uint64_t length :
       {uint64_t{0}, uint64_t{1}, uint64_t{kGoodHeader.size() - 1},
        uint64_t{kGoodHeader.size() + 1}, uint64_t{whole.size()}, uint64_t{99'999'999},
        uint64_t{100'000'001}, uint64_t{1} << 40, uint64_t{1} << 63, ~uint64_t{0}}) {
    file("a length of " + std::to_string(length), with_length(length, whole.substr(8)));
  }

  const auto header = [&](const std::string& what, std::string bytes, bool good = false) {
    all.push_back({"header: " + what, FuzzKind::header, std::move(bytes), good});
  };
  const auto tensor = [](const std::string& shape, const std::string& offsets = "[0,24]") {
    return R"("a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
  };
  std::string ones = "6";
  for (int i = 0; i < 2000; ++i) {
    ones += ",1";
  }
  header("good", kGoodHeader, true);
  header(
      "an empty tensor",
      "{" + tensor("[6]") +
          R"(,"e":{"dtype":"F32","shape":[0,1099511627776],)"
          R"("data_offsets":[24,24]}})",
      true);
  header("a zero byte in a name", R"({"\u0000a":)" + tensor("[6]").substr(4) + "}", true);
  header("2001 dims", "{" + tensor("[" + ones + "]") + "}", false);
  add_broken_json(all, FuzzKind::header, kGoodHeader, "format");
  for (const auto* shape :
       {"[-6]",
        "[6.0]",
        "[6e0]",
        "[\"6\"]",
        "[null]",
        "[[6]]",
        "[true]",
        "6",
        "null",
        "{}",
        "[]",
        "[5]",
        "[7]",
        "[9223372036854775807]",
        "[18446744073709551615]",
        "[18446744073709551622]",
        "[4294967296,4294967296]",
        "[0,4611686018427387904,8]",
        "[3037000500,3037000500,2]",
        "[6,-1,-1]"}) {
    header(c10::str("shape ", shape), "{" + tensor(shape) + "}");
  }
  for (const auto* offsets :
       {"[24,0]", "[0]", "[]", "[0,24,24]", "[1,25]", "[0,25]", "[-24,0]", "[0,24.0]", "[0,\"24\"]",
        "24", "null", "[9223372036854775783,9223372036854775807]",
        "[18446744073709551592,18446744073709551616]"}) {
    header(c10::str("data_offsets ", offsets), "{" + tensor("[6]", offsets) + "}");
  }
  header(
      "a lie that fits itself",
      "{" + tensor("[1152921504606846976]", "[0,4611686018427387904]") + "}");
  header("overlap", replaced(kGoodHeader, "[20,24]", "[18,22]"));
  header("a gap", replaced(kGoodHeader, "[0,20]", "[2,22]"));
  header("the same bytes twice", replaced(replaced(kGoodHeader, "[5]", "[6]"), "[0,20]", "[0,24]"));
  header("an unknown dtype", replaced(kGoodHeader, "I16", "I17"));
  header("a dtype that is none", replaced(kGoodHeader, "\"I16\"", "16"));
  header("no dtype", replaced(kGoodHeader, "\"dtype\":\"I16\",", ""));
  header("no shape", replaced(kGoodHeader, "\"shape\":[2],", ""));
  header("no data_offsets", replaced(kGoodHeader, ",\"data_offsets\":[20,24]", ""));
  header("a tensor that is none", "{\"a\":[]}");
  header("a name twice", "{" + tensor("[3]", "[0,12]") + "," + tensor("[3]", "[12,24]") + "}");
  header("metadata that is none", replaced(kGoodHeader, "{\"format\":\"pt\"}", "[]"));
  header("metadata of numbers", replaced(kGoodHeader, "\"pt\"", "1"));

  const auto shard = [&](const std::string& what, std::string bytes, bool good = false) {
    all.push_back({"shard: " + what, FuzzKind::shard, std::move(bytes), good});
  };
  shard("good", rows_of_w(2), true);
  shard("another tensor", replaced(rows_of_w(0), "\"w\":{\"dtype\"", "\"v\":{\"dtype\""));
  for (const auto* offsets :
       {"[0,0]", "[1,0]", "[3,0]", "[2,1]", "[2]", "[2,0,0]", "[]", "[-2,0]", "[2.0,0]", "2",
        "null", "[1099511627776,0]", "[9223372036854775807,0]", "[9223372036854775806,0]",
        "[4611686018427387904,4611686018427387904]", "[18446744073709551615,0]", "[1e300,0]"}) {
    shard(
        c10::str("saved_offsets ", offsets),
        shard_of_w(c10::str(R"({"w":{"saved_offsets":)", offsets, "}}")));
  }
  using Texts = std::vector<std::string>;
  for (const auto& info : Texts{
           "", "x", "[]", "null", "{}", R"({"v":{"saved_offsets":[2,0]}})", R"({"w":{}})",
           R"({"w":[2,0]})", R"({"w":{"saved_offsets":[2,0],"saved_offsets":[2,0]}})",
           R"({"w":{"saved_offsets":[2,0]},"w":{"saved_offsets":[2,0]}})"}) {
    shard("DCP_SHARDING_INFO " + info, shard_of_w(info));
  }
  shard("nested info", shard_of_w(std::string(100'000, '[')));
  shard("no info", replaced(rows_of_w(2), "DCP_SHARDING_INFO", "SHARDING_INFO"));
  const std::string rows = R"({"w":{"saved_offsets":[2,0]}})";
  shard("another dtype", shard_of_w(rows, "I32"));
  shard("another number of dims", shard_of_w(rows, "F32", "[2,3,1]"));
  shard("other columns", shard_of_w(rows, "F32", "[3,2]"));
  add_broken_json(all, FuzzKind::shard, rows_of_w(2), "dtype");

  const auto index = [&](const std::string& what, std::string bytes, bool good = false) {
    all.push_back({"index: " + what, FuzzKind::index, std::move(bytes), good});
  };
  index("good", kGoodIndex, true);
  index("the map alone", R"({"weight_map":{"a":"good.safetensors"}})", true);
  index("another name", replaced(kGoodIndex, "weight_map", "weights"));
  index("a list for a map", R"({"weight_map":["good.safetensors"]})");
  index("a tensor that is not there", replaced(kGoodIndex, "\"a\"", "\"c\""));
  index("a tensor twice", replaced(kGoodIndex, "\"a\"", "\"b\""));
  for (const auto& name : Texts{
           "", ".", "..", "other.safetensors", "../3/good.safetensors", "/dev/zero", "/etc/passwd",
           "model.safetensors.index.json", "good.safetensors\\u0000x", "good.safetensors/"}) {
    index("file '" + name + "'", R"({"weight_map":{"a":")" + name + "\"}}");
  }
  index("a long name", R"({"weight_map":{"a":")" + std::string(10'000, 'x') + "\"}}");
  for (const auto* value : {"1", "null", "[]", "{}", "[\"good.safetensors\"]"}) {
    index(c10::str("file ", value), c10::str(R"({"weight_map":{"a":)", value, "}}"));
  }
  add_broken_json(all, FuzzKind::index, kGoodIndex, "total_size");

  const auto good = good_manifest();
  const auto manifest = [&](const std::string& from, const std::string& to, bool is_good = false) {
    all.push_back(
        {"manifest: " + to + " for " + from, FuzzKind::manifest, replaced(good, from, to),
         is_good});
  };
  manifest("", "", true);
  manifest("\"time\":0", "\"time\":9223372036854775807", true);
  manifest("\"step\",3", "\"step\",{\"double\":\"nan\"}", true);
  for (const auto* time : {"-1", "1.5", "\"\"", "9223372036854775808"}) {
    manifest("\"time\":0", c10::str("\"time\":", time));
  }
  for (const auto* version : {"0", "2", "-1", "1.0", "\"1\"", "null", "18446744073709551615"}) {
    manifest("\"version\":1", c10::str("\"version\":", version));
  }
  manifest("\"block_bytes\":4194304", "\"block_bytes\":0");
  manifest("fsdp.checkpoint", "fsdp");
  for (const auto* key :
       {"format", "version", "id", "time", "block_bytes", "tensors", "values", "name", "dtype",
        "shape", "pieces", "file", "offset", "offsets", "sizes", "crc32c"}) {
    manifest(c10::str("\"", key, "\":"), c10::str("\"other_", key, "\":"));
  }
  for (const auto* shape :
       {"[4]", "[4,3,1]", "[5,3]", "[3,3]", "[-4,-3]", "[0,3]", "[4.0,3]", "[4,\"3\"]", "12",
        "[9223372036854775807,1]", "[4294967296,4294967296]", "[18446744073709551620,3]"}) {
    manifest("\"shape\":[4,3]", c10::str("\"shape\":", shape));
  }
  for (const auto* sizes :
       {"[2]", "[1,3]", "[3,3]", "[-2,3]", "[9223372036854775807,3]", "[0,0]"}) {
    manifest("\"sizes\":[2,3]", c10::str("\"sizes\":", sizes));
  }
  for (const auto* offsets :
       {"[1,0]", "[3,0]", "[0,0]", "[2]", "[-2,0]", "[9223372036854775807,0]",
        "[9223372036854775806,9223372036854775807]"}) {
    manifest("\"offsets\":[2,0]", c10::str("\"offsets\":", offsets));
  }
  const auto offset = "\"offset\":" + std::to_string(safetensors_file(rows_of_w(0), 0).size());
  for (const auto* other : {"100000", "9223372036854775807", "-1", "1e3", "null", "0"}) {
    manifest(offset, c10::str("\"offset\":", other));
  }
  for (const auto& name : Texts{
           "", ".", "..", "../0.safetensors", "/dev/zero", "2.safetensors", "0.safetensors\\u0000",
           "0.safetensors/"}) {
    manifest("\"0.safetensors\"", "\"" + name + "\"");
  }
  const auto begin = good.find("\"crc32c\":[");
  const auto crcs = good.substr(begin, good.find(']', begin) + 1 - begin);
  for (const auto* other : {"[1]", "[1,2]", "[-1]", "[4294967296]", "[\"1\"]", "1", "{}"}) {
    manifest(crcs, c10::str("\"crc32c\":", other));
  }
  manifest(crcs, "\"crc32c\":[]", true); // nothing to compare with
  for (const auto* dtype : {"\"F16\"", "\"F64\"", "\"?\"", "32", "null"}) {
    manifest("\"F32\"", dtype);
  }
  for (const auto* values :
       {"{}", "[1]", "[[]]", "[[\"a\"]]", "[[1,1]]", "[[\"a\",null]]", "[[\"a\",[]]]",
        "[[\"a\",{\"double\":\"x\"}]]", "[[\"a\",1,1]]", "[[\"a\",18446744073709551615]]",
        "[[\"w\",1]]", "[[\"a\",1],[\"a\",1]]"}) {
    manifest(
        "\"values\":[[\"step\",3],[\"lr\",0.5],[\"name\",\"x\"]]", c10::str("\"values\":", values));
  }
  manifest("\"pieces\":[", "\"pieces\":[null,");
  manifest("\"tensors\":[", "\"tensors\":[null,");
  manifest("\"tensors\":[", "\"tensors\":{},\"others\":[");
  add_broken_json(all, FuzzKind::manifest, good, "format");
  add_dcp(all);
  return all;
}

} // namespace fsdp::test
