#pragma once

#include <cstdint>
#include <functional>
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
    uint64_t value = 0; // the number or its bits, or an index in `texts`
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
  /// Returns the items of a list or the members of an object, for a loop. Other kinds have none.
  Items items() const;

 private:
  friend class JsonTape;
  friend class JsonBuilder;
  JsonView(const JsonTape& tape, size_t number) : tape_(&tape), number_(number) {}
  const JsonTape::Token& token() const {
    return tape_->tokens_[number_];
  }

  const JsonTape* tape_;
  size_t number_; // of its token
};

class JsonView::Items {
 public:
  struct Iterator {
    const JsonTape* tape;
    size_t token;
    JsonView operator*() const {
      return {*tape, token};
    }
    Iterator& operator++() {
      token = tape->tokens_[token].end;
      return *this;
    }
    bool operator!=(const Iterator& other) const {
      return token != other.token;
    }
  };
  explicit Items(const JsonView& view) : view_(view) {}
  Iterator begin() const {
    return {view_.tape_, view_.number_ + 1};
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

/// Refuses duplicate names and deep nesting. If there is a `take`, gives each value at `depth` to
/// it and then drops the value: a text may have very many of them. The members of the outermost
/// object have depth 1, the members of these 2, and so on. `key` is that of the outermost object.
using TakeJson = std::function<void(const std::string& key, JsonView value)>;
JsonTape parse_json(
    std::string_view text, const std::string& file, size_t depth = 0, const TakeJson& take = {});
/// Refuses text that is not UTF-8.
std::string json_text(const nlohmann::json& value, const std::string& file);
/// Returns whether JSON can hold the text.
bool is_utf8(std::string_view text);
/// Returns whether the text can be the name of a file, without a folder.
bool is_file_name(std::string_view text);

/// Returns the member of this name. Looks at all members before it.
JsonView json_field(JsonView object, const char* name, const std::string& file);
const std::string& json_string(JsonView value, const char* what, const std::string& file);
/// Returns a string, which must be the name of a file in the same folder.
const std::string& json_file_name(JsonView value, const char* what, const std::string& file);
JsonView::Items json_list(JsonView value, const char* what, const std::string& file);
JsonView::Items json_members(JsonView value, const char* what, const std::string& file);
/// Returns a whole number, which must not be negative and must fit int64_t.
int64_t json_size(JsonView value, const char* what, const std::string& file);
std::vector<int64_t> json_sizes(JsonView value, const char* what, const std::string& file);

} // namespace fsdp::detail
