#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <fsdp/dtensor.h>
#include <fsdp/export.h>
#include <fsdp/module_ref.h>

namespace torch::optim {
class Optimizer;
}

namespace fsdp {

/// Tensors and other values by name, in the order of their insertion. A value type: copies share
/// the tensors.
class FSDP_API StateDict {
 public:
  /// A plain tensor must be the same on every rank. A DTensor is distributed over the ranks.
  using Value = std::variant<at::Tensor, DTensor, bool, int64_t, double, std::string>;
  using Item = std::pair<std::string, Value>;

  /// Throws ValueError if the key exists already.
  void insert(std::string key, Value value);
  /// Replaces the value of the key, or appends the key.
  void set(const std::string& key, Value value);
  /// Inserts everything from `other`, with `prefix` before each key ("model." for example).
  void insert_all(const StateDict& other, const std::string& prefix = "");
  /// Returns the items whose keys begin with `prefix`, without the prefix.
  StateDict below(std::string_view prefix) const;

  bool contains(std::string_view key) const;
  /// Throws ValueError if the key does not exist.
  const Value& at(std::string_view key) const;
  Value& at(std::string_view key);
  std::vector<std::string> keys() const;
  size_t size() const {
    return items_.size();
  }
  bool empty() const {
    return items_.empty();
  }
  auto begin() const {
    return items_.begin();
  }
  auto end() const {
    return items_.end();
  }

 private:
  std::vector<Item> items_;
  std::unordered_map<std::string, size_t> index_;
};

struct StateDictOptions {
  /// Get: return whole tensors instead of DTensors, on rank 0. The other ranks get an empty
  /// StateDict.
  bool full_state_dict = false;
  /// Get: return tensors in host memory.
  bool cpu_offload = false;
  /// Set: a missing or an unexpected key is an error.
  bool strict = true;
  /// Set: use the values of rank 0. Those of the other ranks are ignored and may be empty.
  bool broadcast_from_rank0 = false;
  /// Get: leave out parameters that need no gradient. Set: such parameters may be missing.
  bool ignore_frozen_params = false;
};

/// Returns the parameters and buffers at and below `module`, under their original names and in
/// their original order. A tied parameter appears under each of its names. The tensors share the
/// model's memory unless an option asks for copies. Modules that are unsharded are resharded
/// first. With `full_state_dict` it is collective, and gathers one tensor at a time.
FSDP_API StateDict get_model_state_dict(ModuleRef module, const StateDictOptions& options = {});
/// Copies values into the parameters and buffers at and below `module`, and converts their
/// dtypes. A value may be a whole tensor, of which each rank takes its part, or a DTensor with
/// any placements. Nothing changes on any rank unless all values fit on all ranks. Collective
/// over the ranks that share the module; with `broadcast_from_rank0`, over the world.
FSDP_API void set_model_state_dict(
    ModuleRef module, const StateDict& state, const StateDictOptions& options = {});

/// Returns the state and the hyper-parameters of an optimizer by parameter name: for example
/// "state.<parameter>.exp_avg", "state.<parameter>.step", "param_groups.<parameter>.lr". So it
/// can be loaded with any number of ranks and any order of parameter groups. Works for Adam,
/// AdamW, SGD, RMSprop and Adagrad of torch, and for all of fsdp::optim.
///
/// State that the optimizer has not made yet is included with its starting values, so that a
/// checkpoint can be loaded into it; the optimizer itself does not get it. State of frozen
/// parameters is included only if it exists. A tied parameter appears under its first name only.
/// You may insert values of your own, such as the state of a scheduler.
FSDP_API StateDict get_optimizer_state_dict(
    ModuleRef module, torch::optim::Optimizer& optimizer, const StateDictOptions& options = {});
/// Sets the optimizer's state as set_model_state_dict sets a model's, and makes state that the
/// optimizer does not have yet. Parameters in one parameter group must get the same
/// hyper-parameters. If `strict`, remove values of your own first (see below()).
FSDP_API void set_optimizer_state_dict(
    ModuleRef module,
    torch::optim::Optimizer& optimizer,
    const StateDict& state,
    const StateDictOptions& options = {});

} // namespace fsdp
