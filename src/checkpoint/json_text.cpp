#include "checkpoint/json_text.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <utility>

#include "base/check.h"

namespace fsdp::detail {

using nlohmann::json;

/// Writes a tape from the parser's events.
class JsonBuilder : public nlohmann::json_sax<json> {
 public:
  JsonBuilder(const std::string& file, size_t depth, const TakeJson& take)
      : file_(file), depth_(depth), take_(take) {}

  JsonTape finish() {
    tape_.texts_.resize(num_texts_);
    return std::move(tape_);
  }

  bool null() override {
    return add(Kind::Null, 0);
  }
  bool boolean(bool value) override {
    return add(Kind::Bool, value ? 1 : 0);
  }
  bool number_integer(int64_t value) override {
    return add(Kind::Negative, static_cast<uint64_t>(value));
  }
  bool number_unsigned(uint64_t value) override {
    return add(Kind::Size, value);
  }
  bool number_float(double value, const std::string&) override {
    return add(Kind::Real, std::bit_cast<uint64_t>(value));
  }
  bool string(std::string& value) override {
    return add(Kind::Text, keep(value));
  }
  bool binary(json::binary_t&) override {
    return false; // not in text
  }
  bool start_object(size_t) override {
    return open(Kind::Object);
  }
  bool start_array(size_t) override {
    return open(Kind::List);
  }
  bool end_object() override {
    return close();
  }
  bool end_array() override {
    return close();
  }
  bool key(std::string& name) override {
    if (open_.size() == 1) {
      key_ = name;
    }
    name_ = keep(name);
    return true;
  }
  bool parse_error(size_t, const std::string&, const json::exception& error) override {
    FSDP_THROW(CheckpointError, file_, ": its JSON is broken: ", error.what());
  }

 private:
  using Kind = JsonTape::Kind;

  size_t keep(const std::string& text) {
    if (num_texts_ == tape_.texts_.size()) {
      tape_.texts_.emplace_back();
    }
    tape_.texts_[num_texts_] = text; // mostly into memory that an earlier text had
    return num_texts_++;
  }
  size_t put(Kind kind, uint64_t value) {
    const auto token = tape_.tokens_.size();
    tape_.tokens_.push_back({.kind = kind, .end = token + 1, .name = name_, .value = value});
    return token;
  }
  bool add(Kind kind, uint64_t value) {
    return ended(put(kind, value));
  }
  bool open(Kind kind) {
    constexpr size_t kMaxDepth = 32;
    FSDP_CHECK_AS(
        CheckpointError, open_.size() < kMaxDepth, file_, ": its JSON is nested too deep");
    open_.push_back({put(kind, 0), num_texts_});
    return true;
  }
  bool close() {
    const auto [token, num_texts] = open_.back();
    open_.pop_back();
    tape_.tokens_[token].end = tape_.tokens_.size();
    check_names(JsonView(tape_, token));
    return ended(token, num_texts);
  }
  /// Called when the value at `token` is complete. The texts from `num_texts` on are inside of it.
  bool ended(size_t token, std::optional<size_t> num_texts = {}) {
    if (!take_ || open_.size() != depth_) {
      return true;
    }
    take_(key_, JsonView(tape_, token));
    const bool is_member = tape_.tokens_[open_.back().token].kind == Kind::Object;
    name_ = tape_.tokens_[token].name;
    tape_.tokens_.resize(token);
    if (is_member) { // its name stays, to find it if it comes again
      put(Kind::Null, 0);
    }
    num_texts_ = num_texts.value_or(num_texts_);
    return true;
  }
  void check_names(JsonView value) {
    names_.clear();
    if (value.is(Kind::Object)) {
      for (const auto member : value.items()) {
        names_.push_back(member.name());
      }
    }
    std::sort(names_.begin(), names_.end());
    const auto twice = std::adjacent_find(names_.begin(), names_.end());
    FSDP_CHECK_AS(
        CheckpointError, twice == names_.end(), file_, ": the key '", *twice, "' occurs twice");
  }

  struct Open {
    size_t token = 0;
    size_t num_texts = 0; // before its first member or item
  };
  const std::string& file_;
  const size_t depth_;
  const TakeJson& take_;
  std::string key_; // of the outermost object
  JsonTape tape_;
  size_t num_texts_ = 0;
  size_t name_ = 0;                     // of the next member
  std::vector<Open> open_;              // the objects and lists that have begun and not ended
  std::vector<std::string_view> names_; // kept for its memory
};

JsonView JsonTape::root() const {
  return {*this, 0};
}

double JsonView::real() const {
  return std::bit_cast<double>(token().value);
}

JsonTape parse_json(
    std::string_view text, const std::string& file, size_t depth, const TakeJson& take) {
  // The parser takes a zero byte for the end of the text, and would ignore what follows.
  FSDP_CHECK_AS(
      CheckpointError, text.find('\0') == std::string_view::npos, file,
      ": its JSON is broken: there is a zero byte in it");
  JsonBuilder builder(file, depth, take);
  json::sax_parse(text, &builder);
  return builder.finish();
}

std::string json_text(const json& value, const std::string& file) {
  try {
    return value.dump();
  } catch (const json::exception& error) {
    FSDP_THROW(
        CheckpointError, file, ": a name or a value cannot be written as JSON: ", error.what());
  }
}

bool is_utf8(std::string_view text) {
  try {
    (void)json(text).dump();
    return true;
  } catch (const json::exception&) {
    return false;
  }
}

bool is_file_name(std::string_view text) {
  constexpr std::string_view kNone("/\0", 2);
  return !text.empty() && text != "." && text != ".." && text.find_first_of(kNone) == text.npos;
}

JsonView json_field(JsonView object, const char* name, const std::string& file) {
  if (object.is(JsonTape::Kind::Object)) {
    for (const auto member : object.items()) {
      if (member.name() == name) {
        return member;
      }
    }
  }
  FSDP_THROW(CheckpointError, file, ": '", name, "' is missing");
}

const std::string& json_string(JsonView value, const char* what, const std::string& file) {
  FSDP_CHECK_AS(
      CheckpointError, value.is(JsonTape::Kind::Text), file, ": '", what, "' is not a string");
  return value.text();
}

const std::string& json_file_name(JsonView value, const char* what, const std::string& file) {
  const auto& name = json_string(value, what, file);
  FSDP_CHECK_AS(
      CheckpointError, is_file_name(name), file, ": '", name,
      "' is not the name of a file in this folder");
  return name;
}

int64_t json_size(JsonView value, const char* what, const std::string& file) {
  FSDP_CHECK_AS(
      CheckpointError,
      value.is(JsonTape::Kind::Size) &&
          value.size() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()),
      file, ": '", what, "' is not a size");
  return static_cast<int64_t>(value.size());
}

JsonView::Items json_list(JsonView value, const char* what, const std::string& file) {
  FSDP_CHECK_AS(
      CheckpointError, value.is(JsonTape::Kind::List), file, ": '", what, "' is not a list");
  return value.items();
}

JsonView::Items json_members(JsonView value, const char* what, const std::string& file) {
  FSDP_CHECK_AS(
      CheckpointError, value.is(JsonTape::Kind::Object), file, ": '", what, "' is not an object");
  return value.items();
}

std::vector<int64_t> json_sizes(JsonView value, const char* what, const std::string& file) {
  std::vector<int64_t> sizes;
  for (const auto item : json_list(value, what, file)) {
    sizes.push_back(json_size(item, what, file));
  }
  return sizes;
}

} // namespace fsdp::detail
