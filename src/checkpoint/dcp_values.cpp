#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "checkpoint/dcp.h"
#include "checkpoint/json_text.h"
#include "checkpoint/pickle.h"
#include "checkpoint/zip.h"

namespace fsdp::detail {

namespace {

/// The pickle of an object is read if it has at most so many bytes.
constexpr int64_t kMaxObjectPickle = int64_t{16} << 20;
/// Containers in containers, at most.
constexpr int kMaxDepth = 32;
/// A name that is longer is none of a state dict.
constexpr size_t kMaxNameBytes = size_t{64} << 10;
/// The values of containers, and their names, may take so much memory.
constexpr size_t kMaxValueBytes = size_t{128} << 20;

/// Returns the type as Python names it.
std::string type_of(const PickleView& value) {
  switch (value.kind()) {
    case Pickle::Kind::None:
      return "None";
    case Pickle::Kind::Bool:
      return "bool";
    case Pickle::Kind::Int:
    case Pickle::Kind::LargeInt:
      return "int";
    case Pickle::Kind::Float:
      return "float";
    case Pickle::Kind::Text:
      return "str";
    case Pickle::Kind::Bytes:
      return "bytes";
    case Pickle::Kind::Tuple:
      return "tuple";
    case Pickle::Kind::List:
      return "list";
    case Pickle::Kind::Dict:
      return "dict";
    case Pickle::Kind::Set:
      return "set";
    case Pickle::Kind::Global:
    case Pickle::Kind::Object:
    case Pickle::Kind::PersistentId:
      break;
  }
  auto name = value.global();
  if (name == "_codecs.encode") { // so does protocol 2 write bytes
    return "bytes";
  }
  if (name.starts_with("torch._utils._rebuild_")) {
    return "torch.Tensor";
  }
  for (const std::string_view module : {"__builtin__.", "builtins."}) {
    if (name.starts_with(module)) {
      name.erase(0, module.size());
    }
  }
  return is_utf8(name) ? name : "";
}

/// Returns a number, flag or string.
std::optional<StoredValue> plain_value(const PickleView& value) {
  switch (value.kind()) {
    case Pickle::Kind::Bool:
      return value.boolean();
    case Pickle::Kind::Int:
      return value.integer();
    case Pickle::Kind::Float:
      return value.real();
    case Pickle::Kind::Text:
      return is_utf8(value.text()) ? std::optional<StoredValue>(std::string(value.text()))
                                   : std::nullopt;
    default:
      return std::nullopt;
  }
}

/// Returns the key of a dict as a part of a name.
std::optional<std::string> key_text(const PickleView& key) {
  if (key.is(Pickle::Kind::Int)) {
    return std::to_string(key.integer());
  }
  return key.is(Pickle::Kind::Text) && is_utf8(key.text()) ? std::optional(std::string(key.text()))
                                                           : std::nullopt;
}

bool is_container(const PickleView& value) {
  return value.is(Pickle::Kind::List) || value.is(Pickle::Kind::Tuple) ||
         value.is(Pickle::Kind::Dict);
}

/// What an object is made of.
struct Contents {
  StoredValues values;
  std::vector<StoredObject> others;
};

/// Takes an object apart. A small pickle can describe a container that contains itself, or that has
/// the same item very often, so time and memory are limited.
class Unpacking {
 public:
  /// `room` is how many bytes the values may take.
  Unpacking(const Pickle& pickle, const StoredObject& object, size_t room)
      : object_(object), room_(room), visits_(pickle.num_bytes()) {
    fits_ = add(pickle.root(), object.name, 0);
  }

  /// Returns nothing if a limit was reached.
  std::optional<Contents> contents() && {
    return fits_ ? std::optional(std::move(contents_)) : std::nullopt;
  }
  size_t room() const {
    return room_;
  }

 private:
  bool add(const PickleView& value, const std::string& name, int depth) {
    constexpr size_t kEach = 128; // what a value takes, besides its texts
    const auto bytes = kEach + name.size() + value.text().size();
    if (visits_ == 0 || depth > kMaxDepth || bytes > room_) {
      return false;
    }
    --visits_;
    room_ -= bytes;
    if (is_container(value)) {
      return add_items(value, name, depth + 1);
    }
    if (auto plain = plain_value(value)) {
      contents_.values.emplace_back(name, std::move(*plain));
    } else if (!value.is(Pickle::Kind::None)) {
      contents_.others.push_back(
          {name, type_of(value), object_.file, object_.offset, object_.bytes});
    }
    return true;
  }

  bool add_items(const PickleView& container, const std::string& name, int depth) {
    const bool is_dict = container.is(Pickle::Kind::Dict);
    for (size_t i = 0; i < container.size(); i += is_dict ? 2 : 1) {
      const auto key = is_dict ? key_text(container[i]) : std::to_string(i);
      if (!key || name.size() + key->size() > kMaxNameBytes ||
          !add(container[is_dict ? i + 1 : i], name + "." + *key, depth)) {
        return false;
      }
    }
    return true;
  }

  const StoredObject& object_;
  size_t room_;
  size_t visits_; // that are left
  Contents contents_;
  bool fits_ = false;
};

/// Returns nothing if this library cannot read the object.
std::optional<Pickle> read_object(const File& file, const StoredObject& object) {
  const auto where = c10::str(file.path().string(), ", '", object.name, "'");
  const ZipArchive archive(file, object.offset, object.bytes, where);
  const auto& record = archive.at("data.pkl");
  if (record.bytes > kMaxObjectPickle) {
    return std::nullopt;
  }
  auto bytes = archive.read(record, kMaxObjectPickle);
  try {
    return Pickle(std::move(bytes), where);
  } catch (const CheckpointError&) {
    return std::nullopt; // the checksum is right, so it is Python's business
  }
}

/// Takes the objects of a catalog apart.
class ValueReader {
 public:
  explicit ValueReader(Catalog& catalog) : catalog_(catalog) {
    for (const auto& tensor : catalog.tensors) {
      names_.insert(tensor.name);
    }
    for (const auto& object : catalog.objects) {
      names_.insert(object.name);
    }
  }

  void run() {
    std::optional<File> file;
    for (auto& object : std::exchange(catalog_.objects, {})) {
      const auto path = catalog_.folder / object.file;
      if (!file || file->path() != path) {
        file = File::open(path);
      }
      const auto pickle = read_object(*file, object);
      take_apart(pickle, std::move(object));
    }
    catalog_.index((catalog_.folder / kDcpMetadataName).string());
  }

 private:
  void take_apart(const std::optional<Pickle>& pickle, StoredObject object) {
    if (pickle) {
      object.type = type_of(pickle->root());
      Unpacking unpacking(*pickle, object, room_);
      const auto room = unpacking.room();
      if (auto contents = std::move(unpacking).contents(); contents && are_new(*contents, object)) {
        room_ = room;
        std::move(
            contents->values.begin(), contents->values.end(), std::back_inserter(catalog_.values));
        std::move(
            contents->others.begin(), contents->others.end(), std::back_inserter(catalog_.objects));
        return;
      }
    }
    catalog_.objects.push_back(std::move(object));
  }

  /// Adds the names of what was in the object. Returns false if others have one of them: a program
  /// may have saved {"a": [1], "a.0": 2}.
  bool are_new(const Contents& contents, const StoredObject& object) {
    std::set<std::string> added;
    const auto add = [&](const std::string& name) {
      return name == object.name || (!names_.contains(name) && added.insert(name).second);
    };
    for (const auto& [name, value] : contents.values) {
      if (!add(name)) {
        return false;
      }
    }
    for (const auto& other : contents.others) {
      if (!add(other.name)) {
        return false;
      }
    }
    names_.merge(added);
    return true;
  }

  Catalog& catalog_;
  std::set<std::string> names_;
  size_t room_ = kMaxValueBytes;
};

} // namespace

void read_dcp_values(Catalog& catalog) {
  ValueReader(catalog).run();
}

void check_dcp_object(const File& file, const StoredObject& object) {
  const auto where = c10::str(file.path().string(), ", '", object.name, "'");
  const ZipArchive archive(file, object.offset, object.bytes, where);
  (void)archive.at("data.pkl");
  for (const auto& [name, record] : archive.records()) {
    const auto offset = archive.data_offset(record);
    FSDP_CHECK_AS(
        CheckpointError, record.crc == 0 || file_crc32(file, offset, record.bytes) == record.crc,
        where, ": the record '", name, "' is damaged: it does not match its checksum");
  }
}

} // namespace fsdp::detail
