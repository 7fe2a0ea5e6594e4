#include <fsdp/sharding_plan.h>

#include <algorithm>
#include <cstdio>

namespace fsdp {

namespace {

constexpr int64_t ShardingPlan::Group::* kNumbers[] = {
    &ShardingPlan::Group::num_params,           &ShardingPlan::Group::numel,
    &ShardingPlan::Group::shard_bytes,          &ShardingPlan::Group::gathered_bytes,
    &ShardingPlan::Group::padding_bytes,        &ShardingPlan::Group::all_gathers,
    &ShardingPlan::Group::all_gather_bytes,     &ShardingPlan::Group::reduce_scatters,
    &ShardingPlan::Group::reduce_scatter_bytes, &ShardingPlan::Group::all_reduces,
    &ShardingPlan::Group::all_reduce_bytes};

std::string mib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f", static_cast<double>(bytes) / (1 << 20));
  return text;
}

} // namespace

ShardingPlan::Group ShardingPlan::total() const {
  Group sum;
  for (const auto& group : groups) {
    for (const auto number : kNumbers) {
      sum.*number += group.*number;
    }
  }
  return sum;
}

std::string ShardingPlan::str() const {
  std::vector<std::vector<std::string>> rows{
      {"module", "params", "elements", "shard MiB", "gathered MiB", "all-gather MiB",
       "reduce-scatter MiB", "all-reduce MiB"}};
  const auto add = [&](const std::string& name, const Group& group) {
    const auto traffic = [](int64_t count, int64_t bytes) {
      return count == 0 ? std::string("-") : mib(bytes) + " in " + std::to_string(count);
    };
    rows.push_back(
        {name, std::to_string(group.num_params), std::to_string(group.numel),
         (group.on_host ? "on host " : "") + mib(group.shard_bytes), mib(group.gathered_bytes),
         traffic(group.all_gathers, group.all_gather_bytes),
         traffic(group.reduce_scatters, group.reduce_scatter_bytes),
         traffic(group.all_reduces, group.all_reduce_bytes)});
  };
  for (const auto& group : groups) {
    add(group.module.empty() ? "(root)" : group.module, group);
  }
  add("total", total());
  std::string text;
  for (const auto& row : rows) {
    for (size_t column = 0; column < row.size(); ++column) {
      size_t width = 0;
      for (const auto& other : rows) {
        width = std::max(width, other[column].size());
      }
      const std::string space(width - row[column].size(), ' ');
      text += column == 0 ? row[column] + space : "  " + space + row[column];
    }
    text += "\n";
  }
  return text;
}

} // namespace fsdp
