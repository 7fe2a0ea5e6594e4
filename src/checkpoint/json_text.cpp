#include "checkpoint/json_text.h"

#include <limits>
#include <utility>

#include "base/check.h"

namespace fsdp::detail {

using nlohmann::json;

namespace {

/// Builds a value from the parser's events. The library's own builder would do, but if it has to
/// call us back, it looks at all members of an object after each of them: a file with a hundred
/// thousand tensors would take minutes.
class JsonBuilder : public nlohmann::json_sax<json> {
 public:
  JsonBuilder(const std::string& file, size_t depth, const TakeJson& take)
      : file_(file), depth_(depth), take_(take) {}

  json take() {
    return std::move(root_);
  }

  bool null() override {
    return add(nullptr);
  }
  bool boolean(bool value) override {
    return add(value);
  }
  bool number_integer(int64_t value) override {
    return add(value);
  }
  bool number_unsigned(uint64_t value) override {
    return add(value);
  }
  bool number_float(double value, const std::string&) override {
    return add(value);
  }
  bool string(std::string& value) override {
    return add(std::move(value));
  }
  bool binary(json::binary_t&) override {
    return false; // not in text
  }
  bool start_object(size_t) override {
    return open(json::object());
  }
  bool start_array(size_t) override {
    return open(json::array());
  }
  bool end_object() override {
    return close();
  }
  bool end_array() override {
    return close();
  }
  bool key(std::string& name) override {
    auto& members = open_.back()->get_ref<json::object_t&>();
    const auto before = members.size();
    const auto place = members.emplace_hint(members.end(), name, nullptr); // most files are sorted
    FSDP_CHECK_AS(
        CheckpointError, members.size() > before, file_, ": the key '", name, "' is there twice");
    next_ = &place->second;
    if (open_.size() == 1) {
      key_ = name;
    }
    return true;
  }
  bool parse_error(size_t, const std::string&, const json::exception& error) override {
    FSDP_THROW(CheckpointError, file_, ": its JSON is broken: ", error.what());
  }

 private:
  void put(json&& value) {
    if (!open_.empty() && open_.back()->is_array()) {
      next_ = &open_.back()->get_ref<json::array_t&>().emplace_back(std::move(value));
    } else {
      *next_ = std::move(value);
    }
  }
  /// Called when `value`, the last one of its parent, is complete.
  bool ended(json& value) {
    if (take_ && open_.size() == depth_) {
      take_(key_, value);
      if (auto& parent = *open_.back(); parent.is_array()) {
        parent.get_ref<json::array_t&>().pop_back();
      } else {
        value = nullptr; // the key stays, to find it if it comes again
      }
    }
    return true;
  }
  bool add(json&& value) {
    put(std::move(value));
    return ended(*next_);
  }
  bool open(json&& value) {
    constexpr size_t kMaxDepth = 32;
    FSDP_CHECK_AS(
        CheckpointError, open_.size() < kMaxDepth, file_, ": its JSON is nested too deep");
    put(std::move(value));
    open_.push_back(next_);
    return true;
  }
  bool close() {
    auto& value = *open_.back();
    open_.pop_back();
    return ended(value);
  }

  const std::string& file_;
  const size_t depth_;
  const TakeJson& take_;
  std::string key_; // of the outermost object
  json root_;
  json* next_ = &root_;     // where the next value goes, unless it goes into a list
  std::vector<json*> open_; // the objects and lists that have begun and not ended
};

} // namespace

json parse_json(std::string_view text, const std::string& file) {
  return parse_json(text, file, 0, {});
}

json parse_json(
    std::string_view text, const std::string& file, size_t depth, const TakeJson& take) {
  // The parser takes a zero byte for the end of the text, and would ignore what follows.
  FSDP_CHECK_AS(
      CheckpointError, text.find('\0') == std::string_view::npos, file,
      ": its JSON is broken: there is a zero byte in it");
  JsonBuilder builder(file, depth, take);
  json::sax_parse(text, &builder);
  return builder.take();
}

std::string json_text(const json& value, const std::string& file) {
  try {
    return value.dump();
  } catch (const json::exception& error) {
    FSDP_THROW(
        CheckpointError, file, ": a name or a value cannot be written as JSON: ", error.what());
  }
}

const json& json_field(const json& object, const char* key, const std::string& file) {
  const auto found = object.find(key); // the end if it is not an object
  FSDP_CHECK_AS(
      CheckpointError, found != object.end(), file, ": there is no '", key,
      "' where one has to be");
  return *found;
}

std::string json_string(const json& value, const char* what, const std::string& file) {
  FSDP_CHECK_AS(CheckpointError, value.is_string(), file, ": '", what, "' is not a string");
  return value.get<std::string>();
}

std::string json_file_name(const json& value, const char* what, const std::string& file) {
  auto name = json_string(value, what, file);
  constexpr std::string_view kNone("/\0", 2);
  FSDP_CHECK_AS(
      CheckpointError,
      !name.empty() && name != "." && name != ".." && name.find_first_of(kNone) == name.npos, file,
      ": '", name, "' is not the name of a file in this folder");
  return name;
}

int64_t json_size(const json& value, const char* what, const std::string& file) {
  FSDP_CHECK_AS(
      CheckpointError,
      value.is_number_unsigned() &&
          value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()),
      file, ": '", what, "' is not a size");
  return value.get<int64_t>();
}

std::vector<int64_t> json_sizes(const json& value, const char* what, const std::string& file) {
  FSDP_CHECK_AS(CheckpointError, value.is_array(), file, ": '", what, "' is not a list");
  std::vector<int64_t> sizes;
  for (const auto& item : value) {
    sizes.push_back(json_size(item, what, file));
  }
  return sizes;
}

} // namespace fsdp::detail
