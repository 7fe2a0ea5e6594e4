#pragma once

#include <ATen/core/Tensor.h>

#include <fsdp/state_dict.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tensor/redistribute.h"

namespace fsdp::detail {

/// A key of a state dict, and the live tensor or the number that it stands for.
struct Entry {
  std::string key;
  at::Tensor local = {};                                 // this rank's part; undefined for a number
  std::optional<TensorSpec> spec = {};                   // none if every rank has the whole tensor
  StateDict::Value value = {};                           // the number
  std::function<void(const StateDict::Value&)> set = {}; // sets the number; may be empty
  const void* tensor = nullptr; // equal for all names of a tied tensor; or null
  bool required = true;         // a strict state dict must have the key
};

/// Returns the entry of a parameter or buffer, which fully_shard or parallelize_module may have
/// placed.
Entry entry_of(std::string key, const at::Tensor& live);

/// Reshards the modules at and below `module`, so that their parameters are shards. If the shards
/// are `about_to_change`, drops gathers under way, which would bring the old values.
void reshard_below(torch::nn::Module& module, bool about_to_change = false);

/// Converts a number of a state dict, or a tensor with one element, to T. Throws a ValueError that
/// names the key if T cannot hold the value.
template <class T>
T number_as(const std::string& key, const StateDict::Value& value);

/// Returns the state dict of these entries. Collective with full_state_dict.
StateDict read(
    const char* function, const std::vector<Entry>& entries, const StateDictOptions& options);

// Note [How a state dict is set]
//
// 1. With broadcast_from_rank0, rank 0 sends the keys, types and sizes of its values to the other
//    ranks, or the reason why it cannot.
// 2. Each rank compares the state dict with its module or optimizer. Nothing is changed yet.
// 3. The ranks tell each other whether the state dict fits, and which tensors have to be moved
//    between ranks. So no rank waits for a rank that threw, or that moves other tensors.
// 4. The values are copied, one tensor at a time.

struct Filling {
  const char* function; // for messages
  torch::nn::Module& module;
  /// Returns the entries to set. With broadcast_from_rank0, the tensors of its argument are on
  /// meta. May throw.
  std::function<std::vector<Entry>(const StateDict&)> entries;
  /// Called when all values have been copied.
  std::function<void()> commit = [] {};
};
void fill(const Filling& filling, const StateDict& state, const StateDictOptions& options);

} // namespace fsdp::detail
