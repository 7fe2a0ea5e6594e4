#include "group/flat_layout.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace fsdp::detail {

namespace {

// Unsharded parameters begin at multiples of this, as if allocated one by one.
constexpr int64_t kAlignment = 256;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int64_t size_of(c10::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

/// The dtype that all items share, or Byte if there are several.
template <class DtypeOf>
c10::ScalarType common_dtype(const std::vector<LayoutItem>& items, DtypeOf dtype_of) {
  const auto first = dtype_of(items.front());
  const bool common = std::all_of(
      items.begin(), items.end(), [&](const auto& item) { return dtype_of(item) == first; });
  return common ? first : c10::ScalarType::Byte;
}

bool continues(const FlatLayout::Span& before, const FlatLayout::Span& span) {
  return before.offset + before.numel == span.offset;
}

} // namespace

bool FlatLayout::sends_shards() const {
  return all_plain() && std::all_of(runs.begin(), runs.end(), [](const auto& run) {
           return run.dtype == run.gather_dtype;
         });
}

FlatLayout flat_layout(const std::vector<LayoutItem>& items, int64_t num_ranks) {
  FlatLayout layout;
  layout.shard_dtype = common_dtype(items, [](const auto& item) { return item.dtype; });
  layout.gather_dtype = common_dtype(items, [](const auto& item) {
    return item.extended ? c10::ScalarType::Byte : item.gather_dtype;
  });
  layout.order.resize(items.size());
  std::iota(layout.order.begin(), layout.order.end(), 0);
  // Wide elements first: then each one is aligned without gaps in what is sent.
  std::stable_sort(layout.order.begin(), layout.order.end(), [&](size_t a, size_t b) {
    const auto key = [&](const LayoutItem& item) {
      return std::tuple(!item.extended, size_of(item.gather_dtype), size_of(item.dtype));
    };
    return key(items[a]) > key(items[b]);
  });
  layout.parts.resize(items.size());
  const auto shard_unit = size_of(layout.shard_dtype);
  const auto gather_unit = size_of(layout.gather_dtype);
  for (const auto i : layout.order) {
    const auto& item = items[i];
    auto& part = layout.parts[i];
    const auto aligned =
        round_up(layout.shard_numel, std::max<int64_t>(size_of(item.dtype) / shard_unit, 1));
    part.shard = {aligned, item.padded_numel * size_of(item.dtype) / shard_unit};
    layout.shard_numel = part.shard.offset + part.shard.numel;
    part.gathered.numel = item.padded_numel * size_of(item.gather_dtype) / gather_unit;
    part.unsharded_offset = layout.unsharded_numel;
    layout.unsharded_numel += round_up(part.gathered.numel * num_ranks, kAlignment / gather_unit);
    if (item.extended) {
      continue;
    }
    ++layout.num_plain;
    part.gathered.offset = layout.gathered_numel;
    layout.gathered_numel += part.gathered.numel;
    auto* last = layout.runs.empty() ? nullptr : &layout.runs.back();
    if (last && last->dtype == item.dtype && last->gather_dtype == item.gather_dtype &&
        continues(last->shard, part.shard)) {
      last->shard.numel += part.shard.numel;
      last->gathered.numel += part.gathered.numel;
    } else {
      layout.runs.push_back({part.shard, part.gathered, item.dtype, item.gather_dtype});
    }
  }
  // Any group of neighbours that `divide` may use gets parts of equal size.
  layout.unsharded_numel = round_up(layout.unsharded_numel, num_ranks);
  return layout;
}

} // namespace fsdp::detail
