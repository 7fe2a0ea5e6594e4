#pragma once

#include <fsdp/extension.h>

namespace fsdp::test {

/// Sends the shard without a change.
struct PlainExtension : AllGatherExtension {
  AllGatherPayload pre_all_gather(const torch::Tensor& shard, const AllGatherInfo&) override {
    return {{shard}};
  }
  void post_all_gather(
      const std::vector<torch::Tensor>& outputs,
      const std::any&,
      const AllGatherInfo& info,
      torch::Tensor& out) override {
    out.copy_(outputs[0].narrow(0, 0, info.sizes[0]));
  }
};

} // namespace fsdp::test
