#pragma once

#include <torch/optim/adamw.h>

#include <cstddef>
#include <functional>
#include <map>
#include <tuple>
#include <vector>

#include "optim/kernel_lists.h"
#include "optim/update.h"

namespace fsdp::detail {

/// The state that AdamW keeps for a parameter.
struct Moments {
  int64_t& step;
  at::Tensor& exp_avg;
  at::Tensor& exp_avg_sq;
  at::Tensor* max_exp_avg_sq = nullptr; // with amsgrad
};

/// AdamW's step, by one or two kernel calls for all parameters that have the same group, dtype,
/// device and number of steps.
class FusedAdamW {
 public:
  /// `optimizer` is the name for messages.
  explicit FusedAdamW(const char* optimizer) : optimizer_(optimizer) {}

  /// Adds a parameter, and makes the moments that it does not have yet. Throws ValueError if they
  /// do not fit the parameter.
  void add(const Update& update, const Moments& moments);

  using OptionsOf = std::function<torch::optim::AdamWOptions(std::size_t group)>;
  void run(const OptionsOf& options_of);

 private:
  struct Bucket {
    KernelLists lists;
    std::vector<int64_t*> steps;
  };
  using Key = std::tuple<std::size_t, at::ScalarType, at::DeviceType, at::DeviceIndex, int64_t>;

  const char* optimizer_;
  std::map<Key, Bucket> buckets_;
};

} // namespace fsdp::detail
