#pragma once

#include <ATen/core/Tensor.h>

#include <fsdp/state_dict.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tensor/redistribute.h"

namespace fsdp::detail {

/// What a key of a state dict stands for: a live tensor, or a number.
struct Entry {
  std::string key;
  at::Tensor local = {};                                 // this rank's part of the tensor
  std::optional<TensorSpec> spec = {};                   // none: every rank has all of it
  StateDict::Value value = {};                           // where there is no tensor
  std::function<void(const StateDict::Value&)> set = {}; // the same
  const void* tensor = nullptr;                          // equal for two names of one
  bool required = true;                                  // in a strict state dict
};

/// This rank's part of a parameter or buffer, whoever placed it.
Entry entry_of(std::string key, const at::Tensor& live);

/// The modules at and below show their shards, as to an optimizer. Where those are
/// about to change, gathers of what they hold now are dropped.
void reshard_below(torch::nn::Module& module, bool about_to_change = false);

/// A number of a state dict as one of another type that holds the same value. Throws
/// ValueError that names the key.
template <class T>
T number_as(const std::string& key, const StateDict::Value& value);

/// The state dict of these entries. With full_state_dict collective.
StateDict read(
    const char* function, const std::vector<Entry>& entries, const StateDictOptions& options);

// Note [How a state dict is set]
//
// 1. Where only rank 0's values count, it tells the others their keys, types and
//    sizes, or why it cannot.
// 2. Each rank compares that with what it has. Nothing is changed.
// 3. The ranks tell each other whether all can: none is left waiting for one
//    that threw, or that has other tensors to move.
// 4. Values are copied, one tensor at a time.

struct Filling {
  const char* function; // for messages
  torch::nn::Module& module;
  /// Given the state dict, perhaps with tensors on meta; may throw.
  std::function<std::vector<Entry>(const StateDict&)> entries;
  /// Called last.
  std::function<void()> commit = [] {};
};
void fill(const Filling& filling, const StateDict& state, const StateDictOptions& options);

} // namespace fsdp::detail
