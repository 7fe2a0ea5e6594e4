#pragma once

#include <fsdp/detail/forward_scope.h>
#include <fsdp/fully_shard.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "interpreter.h"
#include "mesh_spec.h"
#include "state/fsdp_state.h"

namespace fsdp::python {

struct GroupSpec {
  MeshSpec mesh;
  bool replicated; // one axis of whole parameters
  std::vector<detail::ParamSpec> params;
  /// How many ranks keep the parameters after forward; see set_ranks_after_forward.
  int ranks_after_forward;
};

struct PolicySpec {
  MixedPrecisionPolicy precision;
  std::optional<bool> offload; // whether to pin the memory
};

/// One call of fully_shard on Python modules: the engine's state, and the forwards that run.
class ModuleState {
 public:
  /// `look` returns the sharded modules at and below this one, and the parameters if asked to.
  ModuleState(
      const std::string& name,
      const std::vector<py::object>& modules,
      const std::string& device_type,
      const GivenGroup& world,
      const std::vector<GroupSpec>& groups,
      const PolicySpec& policy,
      bool auto_reshard,
      py::object look);

  const std::shared_ptr<detail::FSDPState>& engine() const {
    return engine_;
  }
  FSDPModule handle() const {
    return FSDPModule(engine_);
  }

  /// Gives the parameter the two objects that its user sees. `sites` has pairs of a `_parameters`
  /// and a name. An opaque parameter has an `extension`; it is None for others.
  void bind(
      size_t group,
      size_t param,
      py::object whole,
      py::object pieces,
      py::object dtensor,
      const py::list& sites,
      py::object extension);
  at::Tensor shard(size_t group, size_t param) const;

  /// Runs before the forward of a module. Returns the arguments, or None if they are the same.
  py::object pre_forward(PyObject* module, PyObject* args, PyObject* kwargs);
  py::object post_forward(PyObject* module, PyObject* output);
  /// Ends a forward that threw. `stopped`: a recomputation that has all it wanted, which is no
  /// failure. Nothing to do if no forward of the module is under way.
  void forward_failed(PyObject* module, bool stopped);
  /// Forgets an iteration that did not end.
  void reset();
  /// Reshards, for a state dict, unless the modules have DTensors already.
  void show_shards() const;
  /// Takes over what Module._apply has put into the modules.
  void adopt() const;

 private:
  /// A forward under way. Has no scope if it was called from inside a forward of the same module.
  struct Call {
    PyObject* module;
    std::unique_ptr<detail::ForwardScope> scope;
  };
  detail::FSDPParam& param(size_t group, size_t param) const;

  std::shared_ptr<detail::FSDPState> engine_;
  std::vector<Call> calls_;
};

/// Returns the functions for register_forward_pre_hook and register_forward_hook.
py::tuple forward_hooks(const std::shared_ptr<ModuleState>& state);

} // namespace fsdp::python
