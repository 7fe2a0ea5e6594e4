#include "checkpoint/from_rank_0.h"

#include <ATen/ATen.h>
#include <fsdp/distributed.h>

#include <bit>
#include <utility>

#include "checkpoint/exchange.h"

namespace fsdp::detail {

namespace {

using Value = StateDict::Value;

/// What describes a state dict, as numbers that can be sent.
class Words {
 public:
  Words() = default;
  explicit Words(const at::Tensor& tensor)
      : words_(
            tensor.const_data_ptr<int64_t>(), tensor.const_data_ptr<int64_t>() + tensor.numel()) {}
  at::Tensor tensor() const {
    return at::tensor(words_, at::device(at::kCPU).dtype(at::kLong)); // named because of MetaInit
  }
  void add(int64_t word) {
    words_.push_back(word);
  }
  template <class Range>
  void add_all(const Range& range) {
    add(static_cast<int64_t>(range.size()));
    words_.insert(words_.end(), range.begin(), range.end());
  }
  int64_t next() {
    return words_.at(position_++);
  }
  template <class Range>
  Range next_all() {
    Range range;
    range.resize(static_cast<size_t>(next()));
    for (auto& item : range) {
      item = static_cast<typename Range::value_type>(next());
    }
    return range;
  }

 private:
  std::vector<int64_t> words_;
  size_t position_ = 0;
};

void describe(const std::string& key, const Value& value, Words& words) {
  TORCH_CHECK_VALUE(
      !std::holds_alternative<DTensor>(value), "'", key,
      "' is a DTensor, of which rank 0 has a part only: take the state dict with "
      "full_state_dict, or set it on every rank without broadcast_from_rank0");
  words.add_all(key);
  words.add(static_cast<int64_t>(value.index()));
  if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
    TORCH_CHECK_VALUE(tensor->defined(), "'", key, "' is an undefined tensor");
    words.add(static_cast<int64_t>(tensor->scalar_type()));
    words.add_all(tensor->sizes());
  } else if (const auto* text = std::get_if<std::string>(&value)) {
    words.add_all(*text);
  } else if (const auto* real = std::get_if<double>(&value)) {
    words.add(std::bit_cast<int64_t>(*real));
  } else if (const auto* whole = std::get_if<int64_t>(&value)) {
    words.add(*whole);
  } else {
    words.add(std::get<bool>(value) ? 1 : 0);
  }
}

Value described_value(Words& words) {
  switch (words.next()) {
    case 0: {
      const auto dtype = static_cast<at::ScalarType>(words.next());
      return at::empty(words.next_all<std::vector<int64_t>>(), at::device(at::kMeta).dtype(dtype));
    }
    case 2:
      return words.next() != 0;
    case 3:
      return words.next();
    case 4:
      return std::bit_cast<double>(words.next());
    default:
      return words.next_all<std::string>();
  }
}

} // namespace

bool is_rank_0() {
  return current_world().rank == 0;
}

at::Tensor from_rank_0(const at::Tensor& tensor) {
  auto sent = tensor.to(world_device()).contiguous();
  if (sent.numel() > 0) { // bytes: backends do not know all dtypes
    default_group().broadcast(sent.view(-1).view(at::kByte), 0);
  }
  return sent;
}

StateDict description_from_rank_0(const char* function, const StateDict& state) {
  Words words;
  if (is_rank_0()) {
    try {
      words.add(static_cast<int64_t>(state.size()));
      for (const auto& [key, value] : state) {
        describe(key, value, words);
      }
    } catch (const c10::Error& error) {
      words = {};
      words.add(-1);
      words.add_all(std::string(error.what_without_backtrace()));
    }
  }
  const auto mine = words.tensor();
  Words count;
  count.add(mine.numel());
  const auto numel = from_rank_0(count.tensor()).item<int64_t>();
  words = Words(from_rank_0(is_rank_0() ? mine : at::empty({numel}, mine.options())).to(at::kCPU));
  const auto size = words.next();
  TORCH_CHECK_VALUE(
      size >= 0, "[", function, "] rank 0: ", words.next_all<std::string>(),
      ". Nothing was changed");
  StateDict described;
  for (int64_t i = 0; i < size; ++i) {
    auto key = words.next_all<std::string>();
    described.insert(std::move(key), described_value(words));
  }
  return described;
}

} // namespace fsdp::detail
