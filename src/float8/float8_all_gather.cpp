#include <fsdp/float8.h>

#include <ATen/ATen.h>

#include "float8/float8.h"

namespace fsdp {

namespace detail {

namespace {

class Float8AllGather : public AllGatherExtension {
 public:
  explicit Float8AllGather(Float8Scaling scaling) : scaling_(scaling) {}

  AllGatherPayload pre_all_gather(const at::Tensor& shard, const AllGatherInfo& info) override {
    TORCH_CHECK_VALUE(
        info.sizes.size() >= 2, "[float8_all_gather] '", info.name, "' has sizes ",
        at::IntArrayRef(info.sizes), ", and a parameter of one dim cannot be sent in float8");
    // First to the dtype of compute: so the values are those that float8_linear would round.
    const auto last = static_cast<int64_t>(info.sizes.size()) - 1;
    const auto sent = to_float8(
        shard.to(info.param_dtype),
        scaling_ == Float8Scaling::rowwise ? std::optional(last) : std::nullopt);
    return {{sent.data, sent.scale}};
  }

  void post_all_gather(
      const std::vector<at::Tensor>& outputs,
      const std::any& /*metadata*/,
      const AllGatherInfo& info,
      at::Tensor& out) override {
    auto scale = outputs[1];
    if (scaling_ == Float8Scaling::tensorwise) { // one for each rank; then one for each row
      std::vector<int64_t> sizes(info.sizes.size(), 1);
      sizes[0] = outputs[0].size(0);
      scale = scale.repeat_interleave(sizes[0] / info.mesh.size()).view(sizes);
    }
    if (info.shard_dim == 0) { // behind the last row there is padding
      out.copy_(outputs[0].narrow(0, 0, info.sizes[0]));
      out.mul_(scale.narrow(0, 0, info.sizes[0]));
    } else {
      const auto values = from_float8({outputs[0], scale}, info.param_dtype);
      out.copy_(at::cat(values.chunk(info.mesh.size()), info.shard_dim));
    }
  }

 private:
  const Float8Scaling scaling_;
};

} // namespace

} // namespace detail

std::shared_ptr<AllGatherExtension> float8_all_gather(Float8Scaling scaling) {
  return std::make_shared<detail::Float8AllGather>(scaling);
}

} // namespace fsdp
