#include "checkpoint/pickle.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <utility>

#include "base/check.h"
#include "base/text.h"

namespace fsdp::detail {

/// Runs the program of a pickle.
class PickleReader {
 public:
  PickleReader(Pickle& pickle, const std::string& file)
      : pickle_(pickle), bytes_(pickle.bytes_), file_(file) {}

  void run() {
    FSDP_CHECK_AS(
        CheckpointError, bytes_.size() <= kMaxBytes, file_, ": the pickle has ", bytes_.size(),
        " bytes, more than ", kMaxBytes);
    if (number(1) != kProto) {
      refuse("it is not a pickle of protocol 2 to 5");
    }
    const auto protocol = number(1);
    if (protocol < 2 || protocol > 5) {
      refuse(c10::str("protocol ", protocol, " is not known; 2 to 5 are"));
    }
    while (!ended_) {
      begin_ = at_;
      step(static_cast<unsigned char>(number(1)));
    }
    if (at_ != bytes_.size()) {
      refuse(c10::str(bytes_.size() - at_, " bytes follow its end"));
    }
  }

 private:
  using Kind = Pickle::Kind;
  using Number = Pickle::Number;
  static constexpr size_t kMaxBytes = size_t{1} << 30; // a Number counts more values than these
  static constexpr uint64_t kProto = 0x80;

  [[noreturn]] void refuse(const std::string& why) const {
    FSDP_THROW(
        CheckpointError, file_, ": the pickle is damaged, or not of torch, at byte ", begin_, ": ",
        why);
  }

  // ------------------------------------------------------------ Bytes

  std::string_view take(uint64_t count) {
    if (count > bytes_.size() - at_) {
      refuse("it ends too early");
    }
    const auto taken = bytes_.substr(at_, count);
    at_ += count;
    return taken;
  }

  uint64_t number(size_t count) {
    return little_endian(take(count));
  }

  // ------------------------------------------------------------ Values

  Number add(Kind kind, uint64_t value = 0, size_t length = 0) {
    pickle_.values_.push_back({kind, static_cast<uint32_t>(length), value});
    return static_cast<Number>(pickle_.values_.size() - 1);
  }
  Number add_text(Kind kind, std::string_view text) {
    return add(kind, static_cast<uint64_t>(text.data() - bytes_.data()), text.size());
  }
  Number add_list(Kind kind, std::vector<Number> items) {
    pickle_.lists_.push_back(std::move(items));
    return add(kind, pickle_.lists_.size() - 1);
  }
  Kind kind_of(Number number) const {
    return pickle_.values_[number].kind;
  }
  std::vector<Number>& items_of(Number number) {
    return pickle_.lists_[pickle_.values_[number].value];
  }

  // ------------------------------------------------------------ Stack and memo

  void push(Number number) {
    stack_.push_back(number);
  }
  Number top() const {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) {
      refuse("its stack is empty");
    }
    return stack_.back();
  }
  Number pop() {
    const auto result = top();
    stack_.pop_back();
    return result;
  }
  /// Removes what was pushed since the last mark, and the mark.
  std::vector<Number> pop_to_mark() {
    if (marks_.empty()) {
      refuse("its stack has no mark");
    }
    const auto mark = static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<Number> items(stack_.begin() + mark, stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  std::vector<Number> pop_many(size_t count) {
    std::vector<Number> items(count);
    for (size_t i = count; i-- > 0;) {
      items[i] = pop();
    }
    return items;
  }

  void remember(uint64_t where) {
    if (where > memo_.size()) { // all writers count from 0
      refuse("its memo has a gap");
    }
    memo_.resize(std::max<size_t>(memo_.size(), where + 1));
    memo_[where] = top();
  }
  void recall(uint64_t where) {
    if (where >= memo_.size()) {
      refuse("its memo has no such value");
    }
    push(memo_[where]);
  }

  // ------------------------------------------------------------ Instructions

  /// Appends to the container on top of the stack. What a pickle adds to an object is dropped.
  void extend(Kind kind, const std::vector<Number>& more) {
    const auto target = top();
    if (kind == Kind::Dict && more.size() % 2 != 0) {
      refuse("a key has no value");
    }
    if (kind_of(target) == kind) {
      auto& items = items_of(target);
      items.insert(items.end(), more.begin(), more.end());
    } else if (kind_of(target) != Kind::Object) {
      refuse("it adds to what is not a container");
    }
  }

  void push_global(Number module, Number name) {
    if (kind_of(module) != Kind::Text || kind_of(name) != Kind::Text) {
      refuse("a class has no name");
    }
    push(add_list(Kind::Global, {module, name}));
  }

  Number text_line() {
    const auto end = bytes_.find('\n', at_);
    const auto line = take(end == std::string_view::npos ? bytes_.size() : end - at_);
    take(1);
    return add_text(Kind::Text, line);
  }

  void push_long(uint64_t count) {
    const auto taken = take(count);
    if (count > 8) {
      push(add(Kind::LargeInt));
      return;
    }
    uint64_t value = count > 0 && (taken.back() & 0x80) ? ~uint64_t{0} : 0; // its sign
    for (size_t i = count; i-- > 0;) {
      value = value << 8 | static_cast<unsigned char>(taken[i]);
    }
    push(add(Kind::Int, value));
  }

  void build() {
    const auto state = pop();
    const auto target = top();
    if (kind_of(target) != Kind::Object) {
      refuse("it gives a state to what is not an object");
    }
    items_of(target)[2] = state;
  }

  void make_object(size_t num_arguments) {
    const auto parts = pop_many(1 + num_arguments); // there may be keyword arguments; dropped
    push(add_list(Kind::Object, {parts[0], parts[1], Pickle::kNothing}));
  }

  void step(unsigned char instruction) {
    switch (instruction) {
      case '.': // STOP
        pickle_.root_ = pop();
        if (!stack_.empty() || !marks_.empty()) {
          refuse("it ends with several values");
        }
        ended_ = true;
        return;
      case 0x95: // FRAME
        if (number(8) > bytes_.size() - at_) {
          refuse("it ends too early");
        }
        return;
      case '(': // MARK
        return marks_.push_back(stack_.size());
      case '0': // POP
        pop();
        return;
      case '1': // POP_MARK
        pop_to_mark();
        return;

      case 'N': // NONE
        return push(add(Kind::None));
      case 0x88: // NEWTRUE
      case 0x89: // NEWFALSE
        return push(add(Kind::Bool, instruction == 0x88));
      case 'K': // BININT1
        return push(add(Kind::Int, number(1)));
      case 'M': // BININT2
        return push(add(Kind::Int, number(2)));
      case 'J': // BININT
        return push(
            add(Kind::Int, static_cast<uint64_t>(
                               int64_t{static_cast<int32_t>(static_cast<uint32_t>(number(4)))})));
      case 0x8a: // LONG1
        return push_long(number(1));
      case 0x8b: // LONG4
        return push_long(number(4));
      case 'G': { // BINFLOAT, big-endian
        uint64_t bits = 0;
        for (const auto byte : take(8)) {
          bits = bits << 8 | static_cast<unsigned char>(byte);
        }
        return push(add(Kind::Float, bits));
      }

      case 0x8c: // SHORT_BINUNICODE
        return push(add_text(Kind::Text, take(number(1))));
      case 'X': // BINUNICODE
        return push(add_text(Kind::Text, take(number(4))));
      case 0x8d: // BINUNICODE8
        return push(add_text(Kind::Text, take(number(8))));
      case 'C': // SHORT_BINBYTES
        return push(add_text(Kind::Bytes, take(number(1))));
      case 'B': // BINBYTES
        return push(add_text(Kind::Bytes, take(number(4))));
      case 0x8e: // BINBYTES8
      case 0x96: // BYTEARRAY8
        return push(add_text(Kind::Bytes, take(number(8))));

      case ')': // EMPTY_TUPLE
        return push(add_list(Kind::Tuple, {}));
      case 0x85: // TUPLE1, TUPLE2, TUPLE3
      case 0x86:
      case 0x87:
        return push(add_list(Kind::Tuple, pop_many(instruction - 0x84u)));
      case 't': // TUPLE
        return push(add_list(Kind::Tuple, pop_to_mark()));
      case ']': // EMPTY_LIST
        return push(add_list(Kind::List, {}));
      case 'a': // APPEND
        return extend(Kind::List, pop_many(1));
      case 'e': // APPENDS
        return extend(Kind::List, pop_to_mark());
      case '}': // EMPTY_DICT
        return push(add_list(Kind::Dict, {}));
      case 's': // SETITEM
        return extend(Kind::Dict, pop_many(2));
      case 'u': // SETITEMS
        return extend(Kind::Dict, pop_to_mark());
      case 0x8f: // EMPTY_SET
        return push(add_list(Kind::Set, {}));
      case 0x90: // ADDITEMS
        return extend(Kind::Set, pop_to_mark());
      case 0x91: // FROZENSET
        return push(add_list(Kind::Set, pop_to_mark()));

      case 'c': { // GLOBAL
        const auto module = text_line();
        return push_global(module, text_line());
      }
      case 0x93: { // STACK_GLOBAL
        const auto name = pop();
        return push_global(pop(), name);
      }
      case 'R':  // REDUCE
      case 0x81: // NEWOBJ
        return make_object(1);
      case 0x92: // NEWOBJ_EX
        return make_object(2);
      case 'b': // BUILD
        return build();
      case 'Q': // BINPERSID
        return push(add_list(Kind::PersistentId, pop_many(1)));

      case 'q': // BINPUT
        return remember(number(1));
      case 'r': // LONG_BINPUT
        return remember(number(4));
      case 0x94: // MEMOIZE
        return remember(memo_.size());
      case 'h': // BINGET
        return recall(number(1));
      case 'j': // LONG_BINGET
        return recall(number(4));
      default:
        refuse(c10::str("instruction ", static_cast<int>(instruction), " is not known"));
    }
  }

  Pickle& pickle_;
  const std::string_view bytes_;
  const std::string& file_;
  size_t at_ = 0;
  size_t begin_ = 0; // of the instruction
  bool ended_ = false;
  std::vector<Number> stack_;
  std::vector<size_t> marks_; // sizes of the stack
  std::vector<Number> memo_;
};

Pickle::Pickle(std::string bytes, const std::string& file) : bytes_(std::move(bytes)) {
  PickleReader(*this, file).run();
}

PickleView Pickle::root() const {
  return {*this, root_};
}

double PickleView::real() const {
  return std::bit_cast<double>(value().value);
}

std::string_view PickleView::text() const {
  const bool has_text = is(Pickle::Kind::Text) || is(Pickle::Kind::Bytes);
  return has_text ? std::string_view(pickle_->bytes_).substr(value().value, value().length)
                  : std::string_view();
}

const std::vector<Pickle::Number>& PickleView::items() const {
  static const std::vector<Pickle::Number> none;
  switch (kind()) {
    case Pickle::Kind::Tuple:
    case Pickle::Kind::List:
    case Pickle::Kind::Dict:
    case Pickle::Kind::Set:
    case Pickle::Kind::Global:
    case Pickle::Kind::Object:
    case Pickle::Kind::PersistentId:
      return pickle_->lists_[value().value];
    default:
      return none;
  }
}

size_t PickleView::size() const {
  return items().size();
}

PickleView PickleView::operator[](size_t item) const {
  TORCH_INTERNAL_ASSERT(item < size());
  return {*pickle_, items()[item]};
}

std::optional<PickleView> PickleView::find(std::string_view key) const {
  if (is(Pickle::Kind::Dict)) {
    for (size_t i = 0; i < size(); i += 2) {
      if ((*this)[i].is(Pickle::Kind::Text) && (*this)[i].text() == key) {
        return (*this)[i + 1];
      }
    }
  }
  return std::nullopt;
}

std::string PickleView::global() const {
  auto named = *this;
  if (is(Pickle::Kind::Object)) {
    named = (*this)[0];
  }
  return named.is(Pickle::Kind::Global) ? c10::str(named[0].text(), ".", named[1].text()) : "";
}

PickleView PickleView::arguments() const {
  TORCH_INTERNAL_ASSERT(is(Pickle::Kind::Object));
  return (*this)[1];
}

std::optional<PickleView> PickleView::state() const {
  TORCH_INTERNAL_ASSERT(is(Pickle::Kind::Object));
  const auto state = items()[2];
  return state == Pickle::kNothing ? std::nullopt : std::optional(PickleView(*pickle_, state));
}

} // namespace fsdp::detail
