#include "process_group/exchange.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include <fsdp/distributed.h>

#include "process_group/liveness.h"
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
  return [liveness](int rank) { return !liveness->answers(rank); };
}

std::vector<std::string> gather_texts(const std::string& mine) {
  const auto world = current_world();
  if (world.size == 1) {
    return {mine};
  }
  const auto group = default_group();
  const auto device = world_device();
  const auto gather = [&](const at::Tensor& part) { // on the CPU
    const auto input = part.to(device);
    auto all = at::empty({world.size, part.numel()}, input.options());
    group.all_gather(all, input);
    return all.cpu();
  };
  // The CPU is named because of MetaInit.
  const auto length = static_cast<int64_t>(mine.size());
  const auto lengths = gather(at::full({1}, length, at::device(at::kCPU).dtype(at::kLong)));
  const auto longest = std::max<int64_t>(lengths.max().item<int64_t>(), 1);
  auto padded = at::zeros({longest}, at::device(at::kCPU).dtype(at::kByte));
  std::memcpy(padded.mutable_data_ptr<uint8_t>(), mine.data(), mine.size());
  const auto all = gather(padded);
  std::vector<std::string> texts;
  for (int64_t rank = 0; rank < world.size; ++rank) {
    texts.emplace_back(
        reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>()) + rank * longest,
        static_cast<size_t>(lengths[rank].item<int64_t>()));
  }
  return texts;
}

} // namespace fsdp::detail
