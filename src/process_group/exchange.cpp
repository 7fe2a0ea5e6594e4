#include "process_group/exchange.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include <fsdp/distributed.h>

#include "launch/liveness.h"
#include "process_group/rank_context.h"
#include "runtime/stream.h"

namespace fsdp::detail {

World current_world() {
  return is_initialized() ? World{get_rank(), get_world_size()} : World{};
}

c10::Device world_device() {
  return default_group().backend_name() == "nccl" ? current_device(at::kCUDA)
                                                  : at::Device(at::kCPU);
}

std::function<bool(int rank)> watch_ranks() {
  const auto context = current_context();
  const auto liveness = context ? context->factory->liveness() : nullptr;
  if (!liveness) {
    return {};
  }
  return [liveness](int rank) { return liveness->is_gone(rank); };
}

c10::intrusive_ptr<c10d::Store> world_store() {
  const auto context = current_context();
  const auto store = context ? context->factory->store() : nullptr;
  return store ? store->clone() : nullptr;
}

} // namespace fsdp::detail

namespace fsdp {

std::vector<std::string> gather_texts(const std::string& mine) {
  const auto world = detail::current_world();
  if (world.size == 1) {
    return {mine};
  }
  const auto group = default_group();
  const auto device = detail::world_device();
  // Returns the first `bytes` of every rank's message. A message is the length of
  // the text, then the text.
  const auto gather = [&](std::string message, size_t bytes) {
    message.resize(bytes);
    const auto size = static_cast<int64_t>(bytes);
    // Under MetaInit a tensor without a named device would be a meta tensor.
    auto part = at::empty({size}, at::device(at::kCPU).dtype(at::kByte));
    std::memcpy(part.mutable_data_ptr<uint8_t>(), message.data(), bytes);
    const auto input = part.to(device);
    auto all = at::empty({world.size, size}, input.options());
    group.all_gather(all, input);
    all = all.cpu();
    std::vector<std::string> messages;
    for (int64_t rank = 0; rank < world.size; ++rank) {
      const auto* begin = all.const_data_ptr<uint8_t>() + rank * size;
      messages.emplace_back(begin, begin + size);
    }
    return messages;
  };
  const auto end_of = [](const std::string& message) {
    uint64_t length = 0;
    std::memcpy(&length, message.data(), sizeof(length));
    return sizeof(length) + length;
  };
  const uint64_t length = mine.size();
  const auto message = std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + mine;
  constexpr size_t kShort = 512; // most messages fit, and need no second collective
  auto all = gather(message, kShort);
  size_t longest = kShort;
  for (const auto& theirs : all) {
    longest = std::max(longest, end_of(theirs));
  }
  if (longest > kShort) {
    all = gather(message, longest);
  }
  for (auto& theirs : all) {
    theirs = theirs.substr(sizeof(length), end_of(theirs) - sizeof(length));
  }
  return all;
}

} // namespace fsdp
