#pragma once

#include <fsdp/meta_init.h>

#include "support/sharded.h"

namespace fsdp::test {

struct TwoMLPsImpl : torch::nn::Module {
  explicit TwoMLPsImpl(int64_t dim, bool bias = true, int64_t dim_multiplier = 4)
      : first(register_module("0", MLP(dim, bias, /*with_buffer=*/true, dim_multiplier))),
        second(register_module("1", MLP(dim, bias, /*with_buffer=*/false, dim_multiplier))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return second(first(x));
  }
  MLP first, second;
};
FSDP_MODULE(TwoMLPs);

inline void shard(TwoMLPs& net, const FullyShardOptions& options = {}) {
  fully_shard(net->first, options);
  fully_shard(net->second, options);
  fully_shard(net, options);
}

template <class Holder, class... Args>
Holder on_meta(const Args&... args) {
  const MetaInit meta;
  return Holder(args...);
}

/// Other values for every element of every parameter.
inline void fill_randomly(const std::string&, torch::Tensor& param) {
  param.dim() > 1 ? torch::nn::init::kaiming_uniform_(param) : param.uniform_(-1, 1);
}

inline torch::Tensor default_generator_state() {
  return at::globalContext().defaultGenerator(at::kCPU).get_state();
}

} // namespace fsdp::test
