#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace fsdp::detail {

// Reads and writes the JSON in files. A file may be damaged in any way, so every function throws a
// CheckpointError that names `file` if something is wrong.

class JsonView;

/// The values of a JSON text in their order, each before those inside of it. A checkpoint may have
/// a million of them: a tree of objects in memory would take most of the time of reading it.
class JsonTape {
 public:
  enum class Kind : uint8_t { Null, Bool, Size, Negative, Real, Text, List, Object };

  /// The outermost value.
  JsonView root() const;

 private:
  friend class JsonBuilder;
  friend class JsonView; // and its iterator
  struct Token {
    Kind kind = Kind::Null;
    size_t end = 0;     // the first token behind this value
    size_t name = 0;    // in `texts`, if the value is a member of an object
    uint64_t value = 0; // the number or its bits, or a place in `texts`
  };
  std::vector<Token> tokens_;
  std::vector<std::string> texts_;
};

/// A value in a JsonTape, which must outlive it.
class JsonView {
 public:
  class Items;

  bool is(JsonTape::Kind kind) const {
    return token().kind == kind;
  }
  /// The name of a member of an object.
  const std::string& name() const {
    return tape_->texts_[token().name];
  }
  bool boolean() const {
    return token().value != 0;
  }
  uint64_t size() const {
    return token().value;
  }
  int64_t negative() const {
    return static_cast<int64_t>(token().value);
  }
  double real() const;
  const std::string& text() const {
    return tape_->texts_[token().value];
  }
  /// The items of a list or the members of an object; none for other kinds. For a loop.
  Items items() const;
  /// The member of this name, if this is an object that has it. Looks at all members.
  std::optional<JsonView> find(std::string_view name) const;

 private:
  friend class JsonTape;
  friend class JsonBuilder;
  JsonView(const JsonTape& tape, size_t place) : tape_(&tape), place_(place) {}
  const JsonTape::Token& token() const {
    return tape_->tokens_[place_];
  }

  const JsonTape* tape_;
  size_t place_;
};

class JsonView::Items {
 public:
  struct Iterator {
    const JsonTape* tape;
    size_t place;
    JsonView operator*() const {
      return {*tape, place};
    }
    Iterator& operator++() {
      place = tape->tokens_[place].end;
      return *this;
    }
    bool operator!=(const Iterator& other) const {
      return place != other.place;
    }
  };
  explicit Items(const JsonView& view) : view_(view) {}
  Iterator begin() const {
    return {view_.tape_, view_.place_ + 1};
  }
  Iterator end() const {
    return {view_.tape_, view_.token().end};
  }

 private:
  JsonView view_;
};

inline JsonView::Items JsonView::items() const {
  return Items(*this);
}

/// Refuses duplicate names and deep nesting.
JsonTape parse_json(std::string_view text, const std::string& file);
/// The same for text with very many values of one kind: those at `depth`. 1 are the members of the
/// outermost object, 2 the members of these, and so on. Each of them is given to `take` and then
/// dropped. `key` is that of the outermost object.
using TakeJson = std::function<void(const std::string& key, JsonView value)>;
JsonTape parse_json(
    std::string_view text, const std::string& file, size_t depth, const TakeJson& take);
/// Refuses text that is not UTF-8.
std::string json_text(const nlohmann::json& value, const std::string& file);

JsonView json_field(JsonView object, const char* name, const std::string& file);
const std::string& json_string(JsonView value, const char* what, const std::string& file);
/// A string that must be the name of a file in the same folder.
const std::string& json_file_name(JsonView value, const char* what, const std::string& file);
JsonView::Items json_list(JsonView value, const char* what, const std::string& file);
JsonView::Items json_members(JsonView value, const char* what, const std::string& file);
/// A whole number that must not be negative and must fit int64_t.
int64_t json_size(JsonView value, const char* what, const std::string& file);
std::vector<int64_t> json_sizes(JsonView value, const char* what, const std::string& file);

} // namespace fsdp::detail
