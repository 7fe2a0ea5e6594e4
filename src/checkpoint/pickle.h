#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::detail {

class PickleView;

/// A Python pickle of protocol 2 to 5 as plain values. A pickle is a program for a small machine
/// with a stack. Python runs what it names, so a hostile pickle can do anything there. Here,
/// nothing is ever imported or called: an object is the name of its class, its arguments and its
/// state.
class Pickle {
 public:
  enum class Kind : uint8_t {
    None,
    Bool,
    Int,
    Float,
    Text,
    Bytes,
    Tuple,
    List,
    Dict,
    Set,
    Global,       // a class or a function, by its name
    Object,       // what a Global makes of its arguments
    PersistentId, // of something outside of the pickle; torch.save has a tensor's storage there
    LargeInt      // an integer of more than 64 bits
  };

  /// Throws a CheckpointError that names `file` if the bytes are not a pickle of these protocols,
  /// or if something follows it. Takes time and memory in proportion to the bytes.
  Pickle(std::string bytes, const std::string& file);

  PickleView root() const;
  size_t num_bytes() const {
    return bytes_.size();
  }

 private:
  friend class PickleReader;
  friend class PickleView;
  // Values refer to others by number: they may share them, and may even contain themselves.
  using Number = uint32_t;
  struct Value {
    Kind kind = Kind::None;
    uint32_t length = 0; // of a text
    uint64_t value = 0;  // a number or its bits, where a text begins in `bytes_`, or a list's index
  };
  static constexpr Number kNothing = ~Number{0};

  std::string bytes_;
  std::vector<Value> values_;
  // The items of containers. A dict has its keys and values in turn, a Global has the texts of its
  // module and its name, an Object has its class, arguments and state.
  std::vector<std::vector<Number>> lists_;
  Number root_ = kNothing;
};

/// A value in a Pickle, which must outlive it.
class PickleView {
 public:
  Pickle::Kind kind() const {
    return value().kind;
  }
  bool is(Pickle::Kind kind) const {
    return value().kind == kind;
  }
  bool boolean() const {
    return value().value != 0;
  }
  int64_t integer() const {
    return static_cast<int64_t>(value().value);
  }
  double real() const;
  /// Returns the text or the bytes; empty for other kinds.
  std::string_view text() const;
  /// The number of items of a container. A dict has two for each key: a key and its value. A
  /// PersistentId has one.
  size_t size() const;
  /// `item` must be less than `size()`.
  PickleView operator[](size_t item) const;
  /// Returns the value at a key, if this is a dict that has it.
  std::optional<PickleView> find(std::string_view key) const;
  /// Returns "module.name" of a Global, or of the class of an Object. Else empty.
  std::string global() const;
  /// Of an Object. Both may be values of any kind.
  PickleView arguments() const;
  std::optional<PickleView> state() const;

 private:
  friend class Pickle;
  PickleView(const Pickle& pickle, Pickle::Number number) : pickle_(&pickle), number_(number) {}
  const Pickle::Value& value() const {
    return pickle_->values_[number_];
  }
  const std::vector<Pickle::Number>& items() const;

  const Pickle* pickle_;
  Pickle::Number number_;
};

} // namespace fsdp::detail
