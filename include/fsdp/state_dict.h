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

/// Named tensors and values, in the order in which they were put in. A value
/// type: copies share the tensors.
class FSDP_API StateDict {
 public:
  /// A tensor is the same on every rank; a DTensor is spread over ranks.
  using Value = std::variant<at::Tensor, DTensor, bool, int64_t, double, std::string>;
  using Item = std::pair<std::string, Value>;

  /// Throws ValueError where there is one of this name already.
  void insert(std::string key, Value value);
  /// Replaces, or appends.
  void set(const std::string& key, Value value);
  /// All of another one, below a prefix: "model." for example.
  void insert_all(const StateDict& other, const std::string& prefix = "");
  /// Those below a prefix, without it.
  StateDict below(std::string_view prefix) const;

  bool contains(std::string_view key) const;
  /// Throws ValueError where there is none.
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
  /// Whole tensors instead of DTensors, on rank 0; the others' are empty.
  bool full_state_dict = false;
  /// In host memory.
  bool cpu_offload = false;
  /// A missing or an unexpected key is an error.
  bool strict = true;
  /// Set: the values of rank 0 count, those of the others may be empty.
  bool broadcast_from_rank0 = false;
  /// Get: without parameters that need no gradient. Set: they may be missing.
  bool ignore_frozen_params = false;
};

/// The parameters and persistent buffers at and below `module`, under their
/// original names in their original order, tied ones under each name. DTensors
/// alias the live shards; the modules are resharded first. With
/// `full_state_dict` collective, one tensor at a time.
FSDP_API StateDict get_model_state_dict(ModuleRef module, const StateDictOptions& options = {});
/// Copies the values into the parameters and buffers: whole tensors, of which each
/// rank takes its part, or DTensors, placed in any way. Converts dtypes. Nothing
/// changes on any rank unless all of them fit on all. Collective over the ranks that
/// the module lies on, or with broadcast_from_rank0 over the world.
FSDP_API void set_model_state_dict(
    ModuleRef module, const StateDict& state, const StateDictOptions& options = {});

/// By parameter name, so that it fits any number of ranks and any order of
/// parameter groups: "state.<parameter>.exp_avg", "state.<parameter>.step",
/// "param_groups.<parameter>.lr". For torch's and fsdp's Adam, AdamW, SGD, RMSprop and
/// Adagrad. State that the optimizer has not made yet is there as it will start,
/// so that a checkpoint can be loaded into it; the optimizer does not get it. That
/// of frozen parameters is there where it exists. Tied parameters have one name, the
/// first. Values of your own, a scheduler's for example, may be inserted.
FSDP_API StateDict get_optimizer_state_dict(
    ModuleRef module, torch::optim::Optimizer& optimizer, const StateDictOptions& options = {});
/// As set_model_state_dict; makes state that is missing. Parameters of one group
/// must have the same hyper-parameters. Take out values of your own first (below()).
FSDP_API void set_optimizer_state_dict(
    ModuleRef module,
    torch::optim::Optimizer& optimizer,
    const StateDict& state,
    const StateDictOptions& options = {});

} // namespace fsdp
