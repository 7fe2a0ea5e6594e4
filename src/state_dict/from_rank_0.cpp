#include "state_dict/from_rank_0.h"

#include <ATen/ATen.h>
#include <fsdp/distributed.h>

#include <cstring>
#include <vector>

#include <nlohmann/json.hpp>

#include "process_group/exchange.h"

namespace fsdp::detail {

namespace {

using nlohmann::json;
using Value = StateDict::Value;

/// Returns the dtype and sizes of a tensor, and other values as they are.
json described(const std::string& key, const Value& value) {
  TORCH_CHECK_VALUE(
      !std::holds_alternative<DTensor>(value), "'", key,
      "' is a DTensor, of which rank 0 has a part only: take the state dict with "
      "full_state_dict, or set it on every rank without broadcast_from_rank0");
  return std::visit(
      [&]<class T>(const T& held) -> json {
        if constexpr (std::is_same_v<T, at::Tensor>) {
          TORCH_CHECK_VALUE(held.defined(), "'", key, "' is an undefined tensor");
          return {{"dtype", static_cast<int>(held.scalar_type())}, {"sizes", held.sizes().vec()}};
        } else if constexpr (!std::is_same_v<T, DTensor>) {
          return held;
        }
        return {};
      },
      value);
}

Value value_of(const json& description) {
  if (description.is_object()) {
    const auto dtype = static_cast<at::ScalarType>(description["dtype"].get<int>());
    return at::empty(
        description["sizes"].get<std::vector<int64_t>>(), at::device(at::kMeta).dtype(dtype));
  }
  if (description.is_boolean()) {
    return description.get<bool>();
  }
  if (description.is_number_float()) {
    return description.get<double>();
  }
  if (description.is_number()) {
    return description.get<int64_t>();
  }
  return description.get<std::string>();
}

/// Sends MessagePack: JSON text cannot hold NaN, or strings that are not UTF-8.
json json_from_rank_0(const json& value) {
  const auto bytes = json::to_msgpack(value);
  const auto options = at::device(at::kCPU); // without a device, MetaInit would choose meta
  const auto size = static_cast<int64_t>(bytes.size());
  const auto length = from_rank_0(at::full({1}, size, options.dtype(at::kLong))).item<int64_t>();
  auto sent = at::empty({length}, options.dtype(at::kByte));
  if (is_rank_0()) {
    std::memcpy(sent.mutable_data_ptr<uint8_t>(), bytes.data(), bytes.size());
  }
  sent = from_rank_0(sent).cpu();
  const auto* begin = sent.const_data_ptr<uint8_t>();
  return json::from_msgpack(begin, begin + length);
}

} // namespace

bool is_rank_0() {
  return current_world().rank == 0;
}

at::Tensor from_rank_0(const at::Tensor& tensor) {
  auto sent = tensor.to(world_device()).contiguous();
  if (sent.numel() > 0) { // as bytes: backends do not support all dtypes
    default_group().broadcast(sent.view(-1).view(at::kByte), 0);
  }
  return sent;
}

StateDict description_from_rank_0(const char* function, const StateDict& state) {
  auto items = json::array(); // or an object with the error
  if (is_rank_0()) {
    try {
      for (const auto& [key, value] : state) {
        items.push_back(json::array({key, described(key, value)}));
      }
    } catch (const c10::Error& error) {
      items = {{"error", error.what_without_backtrace()}};
    }
  }
  items = json_from_rank_0(items);
  TORCH_CHECK_VALUE(
      items.is_array(), "[", function, "] rank 0: ", items["error"].get<std::string>(),
      ". Nothing was changed");
  StateDict result;
  for (const auto& item : items) {
    result.insert(item[0].get<std::string>(), value_of(item[1]));
  }
  return result;
}

} // namespace fsdp::detail
