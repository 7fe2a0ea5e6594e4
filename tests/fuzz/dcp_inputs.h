#pragma once

// Folders of torch.distributed.checkpoint as it would write them: pickles and zip archives by hand.

#include <ATen/ATen.h>

#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fuzz/input.h"

namespace fsdp::test {

// ------------------------------------------------------------ Pickles

/// Little-endian.
inline std::string number_bytes(uint64_t number, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    text.push_back(static_cast<char>(number >> (8 * i) & 0xff));
  }
  return text;
}

/// The instructions that push a value.
struct Pickled {
  std::string code;

  static Pickled text(std::string_view text) {
    return {"X" + number_bytes(text.size(), 4) + std::string(text)};
  }
  static Pickled integer(int64_t number) {
    return {"\x8a\x08" + number_bytes(static_cast<uint64_t>(number), 8)};
  }
  static Pickled none() {
    return {"N"};
  }
  static Pickled tuple(const std::vector<Pickled>& items) {
    return {"(" + joined(items) + "t"};
  }
  static Pickled list(const std::vector<Pickled>& items) {
    return {"](" + joined(items) + "e"};
  }
  /// Keys and values in turn.
  static Pickled dict(const std::vector<Pickled>& items) {
    return {"}(" + joined(items) + "u"};
  }
  static Pickled global(const std::string& module, const std::string& name) {
    return {"c" + module + "\n" + name + "\n"};
  }
  static Pickled object(const Pickled& made_by, const std::vector<Pickled>& arguments) {
    return {made_by.code + tuple(arguments).code + "R"};
  }
  Pickled with_state(const Pickled& state) const {
    return {code + state.code + "b"};
  }

  std::string bytes() const {
    return "\x80\x02" + code + ".";
  }

 private:
  static std::string joined(const std::vector<Pickled>& items) {
    std::string all;
    for (const auto& item : items) {
      all += item.code;
    }
    return all;
  }
};

inline Pickled pickled_sizes(const std::vector<int64_t>& sizes) {
  std::vector<Pickled> numbers;
  for (const auto size : sizes) {
    numbers.push_back(Pickled::integer(size));
  }
  return Pickled::object(Pickled::global("torch", "Size"), {Pickled::tuple(numbers)});
}

// ------------------------------------------------------------ Archives

/// Without checksums, so that changed bytes are looked at.
inline std::string zip_archive(const std::vector<std::pair<std::string, std::string>>& records) {
  std::string all;
  std::string directory;
  for (const auto& [name, data] : records) {
    const auto path = "archive/" + name;
    const auto header = all.size();
    const auto common = number_bytes(0, 4) + number_bytes(0, 4) + number_bytes(0, 4) +
                        number_bytes(data.size(), 4) + number_bytes(data.size(), 4) +
                        number_bytes(path.size(), 2) + number_bytes(0, 2);
    all += number_bytes(0x04034b50, 4) + number_bytes(0, 2) + common + path + data;
    directory += number_bytes(0x02014b50, 4) + number_bytes(0, 4) + common + number_bytes(0, 8) +
                 number_bytes(0, 2) + number_bytes(header, 4) + path;
  }
  const auto begin = all.size();
  return all + directory + number_bytes(0x06054b50, 4) + number_bytes(0, 4) +
         number_bytes(records.size(), 2) + number_bytes(records.size(), 2) +
         number_bytes(directory.size(), 4) + number_bytes(begin, 4) + number_bytes(0, 2);
}

/// How torch.save describes a tensor.
struct SavedDescription {
  std::string made_by = "_rebuild_tensor_v2";
  std::string storage = "FloatStorage";
  std::string key = "0";
  int64_t offset = 0;
  std::vector<int64_t> sizes = {2, 3};
  std::vector<int64_t> strides = {3, 1};

  std::string bytes() const {
    const auto storage_tuple = Pickled::tuple(
        {Pickled::text("storage"), Pickled::global("torch", storage), Pickled::text(key),
         Pickled::text("cpu"), Pickled::integer(6)});
    const auto numbers = [](const std::vector<int64_t>& all) {
      std::vector<Pickled> items;
      for (const auto number : all) {
        items.push_back(Pickled::integer(number));
      }
      return Pickled::tuple(items);
    };
    return Pickled::object(
               Pickled::global("torch._utils", made_by),
               {{storage_tuple.code + "Q"},
                Pickled::integer(offset),
                numbers(sizes),
                numbers(strides),
                {"\x89"},
                Pickled::object(Pickled::global("collections", "OrderedDict"), {})})
        .bytes();
  }
};

inline std::string tensor_archive(const std::string& description, size_t data_bytes) {
  return zip_archive(
      {{"data.pkl", description},
       {"byteorder", "little"},
       {"data/0", std::string(data_bytes, 'x')}});
}

// ------------------------------------------------------------ .metadata

/// Of a tensor w in two files, and of an object o in a third one.
struct DcpDescription {
  std::string dtype = "float32";
  std::vector<int64_t> sizes = {4, 3};
  std::vector<std::vector<int64_t>> offsets = {{0, 0}, {2, 0}};
  std::vector<int64_t> chunk = {2, 3};
  std::string file = "1.distcp"; // of the second chunk
  int64_t offset = 0;            // in this file
  int64_t length = 0;            // of the archives
  int64_t second_length = 0;
  int64_t object_length = 0;
  std::string transform = {};
  std::string object_type = "BytesStorageMetadata";

  static Pickled of_class(const std::string& name, const std::vector<Pickled>& state) {
    const auto made_by = Pickled::global("torch.distributed.checkpoint.metadata", name);
    return Pickled{made_by.code + ")\x81"}.with_state(Pickled::dict(state));
  }
  static Pickled index(const std::string& name, const std::vector<Pickled>& offset) {
    std::vector<Pickled> state = {Pickled::text("fqn"), Pickled::text(name)};
    state.insert(state.end(), offset.begin(), offset.end());
    return of_class("MetadataIndex", state);
  }
  Pickled info(const std::string& path, int64_t begin, int64_t bytes) const {
    std::vector<Pickled> state = {Pickled::text("relative_path"), Pickled::text(path),
                                  Pickled::text("offset"),        Pickled::integer(begin),
                                  Pickled::text("length"),        Pickled::integer(bytes)};
    if (!transform.empty()) {
      state.push_back(Pickled::text("transform_descriptors"));
      state.push_back(Pickled::list({Pickled::text(transform)}));
    }
    return of_class("_StorageInfo", state);
  }

  std::string bytes() const {
    std::vector<Pickled> chunks;
    std::vector<Pickled> storage = {index("o", {}), info("2.distcp", 0, object_length)};
    for (size_t i = 0; i < offsets.size(); ++i) {
      chunks.push_back(of_class(
          "ChunkStorageMetadata", {Pickled::text("offsets"), pickled_sizes(offsets[i]),
                                   Pickled::text("sizes"), pickled_sizes(chunk)}));
      storage.push_back(index("w", {Pickled::text("offset"), pickled_sizes(offsets[i])}));
      storage.push_back(i == 0 ? info("0.distcp", 0, length) : info(file, offset, second_length));
    }
    const auto properties =
        Pickled{
            Pickled::global("torch.distributed.checkpoint.metadata", "TensorProperties").code +
            ")\x81"}
            .with_state(Pickled::tuple({Pickled::global("torch", dtype), Pickled::none()}));
    const auto tensor = of_class(
        "TensorStorageMetadata",
        {Pickled::text("properties"), properties, Pickled::text("size"), pickled_sizes(sizes),
         Pickled::text("chunks"), Pickled::list(chunks)});
    return of_class(
               "Metadata",
               {Pickled::text("state_dict_metadata"),
                Pickled::dict(
                    {Pickled::text("w"), tensor, Pickled::text("o"), of_class(object_type, {})}),
                Pickled::text("storage_data"), Pickled::dict(storage)})
        .bytes();
  }
};

inline std::string object_archive(const std::string& pickle) {
  return zip_archive({{"data.pkl", pickle}});
}

inline const std::string kGoodTensorArchive = tensor_archive(SavedDescription().bytes(), 24);
inline const std::string kGoodObject =
    Pickled::list({Pickled::integer(1), Pickled::dict({Pickled::text("a"), Pickled::text("b")})})
        .bytes();
inline const std::string kGoodObjectArchive = object_archive(kGoodObject);

/// With lengths that fit the good archives.
inline DcpDescription good_dcp() {
  DcpDescription dcp;
  dcp.length = static_cast<int64_t>(kGoodTensorArchive.size());
  dcp.second_length = dcp.length;
  dcp.object_length = static_cast<int64_t>(kGoodObjectArchive.size());
  return dcp;
}

// ------------------------------------------------------------ Corpus

using DcpSizes = std::vector<int64_t>;
inline constexpr auto kLargest = std::numeric_limits<int64_t>::max();

inline void add_dcp_metadata(std::vector<FuzzInput>& all) {
  const auto metadata = [&](const std::string& what, auto change, bool good = false) {
    auto dcp = good_dcp();
    change(dcp);
    all.push_back({".metadata: " + what, FuzzKind::dcp_metadata, dcp.bytes(), good});
  };
  metadata("good", [](auto&) {}, true);
  metadata("another dtype", [](auto& dcp) { dcp.dtype = "int32"; });
  metadata("no dtype", [](auto& dcp) { dcp.dtype = ""; });
  metadata("an unknown type", [](auto& dcp) { dcp.object_type = "Metadata"; });
  metadata("a transformation", [](auto& dcp) { dcp.transform = "zip/1"; });
  for (const auto& sizes :
       {DcpSizes{},
        {4},
        {5, 3},
        {3, 3},
        {-4, 3},
        {0, 3},
        {4, 3, 1},
        {kLargest, 3},
        {kLargest, 0},
        {int64_t{1} << 32, int64_t{1} << 32},
        DcpSizes(2000, 1)}) {
    metadata(c10::str("size ", at::IntArrayRef(sizes)), [&](auto& dcp) { dcp.sizes = sizes; });
    metadata(c10::str("sizes ", at::IntArrayRef(sizes)), [&](auto& dcp) { dcp.chunk = sizes; });
  }
  for (const auto& offsets :
       {DcpSizes{}, {2}, {0, 0}, {1, 0}, {3, 0}, {2, 1}, {-2, 0}, {kLargest, 0}, {2, 0, 0}}) {
    metadata(c10::str("offsets ", at::IntArrayRef(offsets)), [&](auto& dcp) {
      dcp.offsets[1] = offsets;
    });
  }
  for (const auto* file :
       {"", ".", "..", "3.distcp", "../0.distcp", "/dev/zero", ".metadata", "1.distcp/", "\xff"}) {
    metadata(c10::str("relative_path ", file), [&](auto& dcp) { dcp.file = file; });
  }
  for (const auto number : {int64_t{-1}, int64_t{1}, int64_t{1000}, int64_t{1} << 40, kLargest}) {
    metadata(c10::str("offset ", number), [&](auto& dcp) { dcp.offset = number; });
    metadata(c10::str("length ", number), [&](auto& dcp) { dcp.second_length = number; });
    metadata(c10::str("length of o ", number), [&](auto& dcp) { dcp.object_length = number; });
  }
  all.push_back({".metadata: of none", FuzzKind::dcp_metadata, Pickled::none().bytes()});
  all.push_back({".metadata: no bytes", FuzzKind::dcp_metadata, ""});
}

inline void add_dcp_archives(std::vector<FuzzInput>& all) {
  const auto archive = [&](const std::string& what, std::string bytes, bool good = false) {
    all.push_back({"archive: " + what, FuzzKind::dcp_archive, std::move(bytes), good});
  };
  archive("good", kGoodTensorArchive, true);
  archive("too few bytes", tensor_archive(SavedDescription().bytes(), 23));
  archive("more bytes", tensor_archive(SavedDescription().bytes(), 25), true);
  archive("an object", kGoodObjectArchive);
  archive("no records", zip_archive({}));
  archive("records twice", zip_archive({{"data.pkl", "x"}, {"data.pkl", "x"}}));
  archive("big-endian", zip_archive({{"byteorder", "big"}, {"data.pkl", "x"}}));
  archive("half", kGoodTensorArchive.substr(0, kGoodTensorArchive.size() / 2));
}

inline void add_dcp_tensors(std::vector<FuzzInput>& all) {
  const auto tensor = [&](const std::string& what, auto change, bool good = false) {
    SavedDescription saved;
    change(saved);
    all.push_back({"tensor: " + what, FuzzKind::dcp_tensor, saved.bytes(), good});
  };
  tensor("good", [](auto&) {}, true);
  tensor("columns first", [](auto& saved) { saved.strides = {1, 2}; }, true);
  tensor("another function", [](auto& saved) { saved.made_by = "_rebuild_parameter"; });
  tensor("one without its dtype", [](auto& saved) { saved.made_by = "_rebuild_tensor_v3"; });
  tensor("another storage", [](auto& saved) { saved.storage = "IntStorage"; });
  tensor("no storage", [](auto& saved) { saved.storage = ""; });
  tensor("another key", [](auto& saved) { saved.key = "1"; });
  for (const auto offset : {int64_t{-1}, int64_t{1}, int64_t{1} << 61, kLargest}) {
    tensor(c10::str("offset ", offset), [&](auto& saved) { saved.offset = offset; });
  }
  for (const auto& sizes : {DcpSizes{}, {2}, {3, 2}, {1, 3}, {2, -3}, {kLargest, 3}}) {
    tensor(c10::str("size ", at::IntArrayRef(sizes)), [&](auto& saved) { saved.sizes = sizes; });
  }
  for (const auto& strides :
       {DcpSizes{}, {3}, {0, 0}, {1, 1}, {3, 2}, {6, 1}, {-3, 1}, {kLargest, 1}, {1, kLargest}}) {
    tensor(c10::str("strides ", at::IntArrayRef(strides)), [&](auto& saved) {
      saved.strides = strides;
    });
  }
}

/// Objects that cannot be read are left out.
inline void add_dcp_objects(std::vector<FuzzInput>& all) {
  std::string nested = std::string(100'000, ']') + std::string(99'999, 'a');
  std::string doubled = ")q" + std::string(1, '\0');
  for (char i = 0; i < 100; ++i) {
    doubled += std::string{'h', i, 'h', i, '\x86', 'q', static_cast<char>(i + 1)};
  }
  std::string repeated = Pickled::text(std::string(10'000, 'x')).code + "q" + std::string(1, '\0');
  for (int i = 0; i < 100'000; ++i) {
    repeated += std::string{'h', '\0'};
  }
  for (const auto& [what, code] : std::vector<std::pair<std::string, std::string>>{
           {"good", kGoodObject.substr(2, kGoodObject.size() - 3)},
           {"itself in it", std::string("]q\0h\0a", 6)},
           {"deep", nested},
           {"many at the end", "(" + doubled + "t"},
           {"a long text, often", "(" + repeated + "t"},
           {"a command", Pickled::object(Pickled::global("os", "system"), {}).code},
           {"an unknown instruction", "I1\n"}}) {
    all.push_back({"object: " + what, FuzzKind::dcp_object, Pickled{code}.bytes(), true});
  }
}

/// What may be wrong in a folder of torch.distributed.checkpoint.
inline void add_dcp(std::vector<FuzzInput>& all) {
  add_dcp_metadata(all);
  add_dcp_archives(all);
  add_dcp_tensors(all);
  add_dcp_objects(all);
}

} // namespace fsdp::test
