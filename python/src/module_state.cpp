#include "module_state.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include "arguments.h"
#include "base/text.h"
#include "opaque_param.h"

namespace fsdp::python {

namespace {

using detail::DataParallelMesh;
using detail::FSDPParamGroup;
using detail::FSDPState;

DataParallelMesh data_parallel_mesh(const GroupSpec& spec, const GivenGroup& world) {
  const auto mesh = mesh_of(spec.mesh, world);
  return spec.replicated ? DataParallelMesh::replicated(mesh) : DataParallelMesh(mesh);
}

FSDPState::Groups make_groups(
    const std::string& name,
    const std::vector<GroupSpec>& specs,
    const GivenGroup& world,
    const PolicySpec& policy) {
  detail::GroupPolicy group_policy{.precision = policy.precision, .offload = {}};
  if (policy.offload) {
    group_policy.offload = CPUOffloadPolicy{*policy.offload};
  }
  std::vector<DataParallelMesh> meshes;
  for (const auto& spec : specs) { // all checks come before the first change
    meshes.push_back(data_parallel_mesh(spec, world));
    for (const auto& param : spec.params) {
      detail::check_shardable(param, meshes.back());
    }
  }
  FSDPState::Groups groups;
  for (size_t i = 0; i < specs.size(); ++i) {
    auto group = std::make_shared<FSDPParamGroup>(specs[i].params, meshes[i], name, group_policy);
    group->set_ranks_after_forward(specs[i].ranks_after_forward);
    groups.push_back(std::move(group));
  }
  return groups;
}

/// Asks Python which sharded modules and parameters there are.
detail::Subtree subtree_of(const Reference& look, bool with_tensors) {
  const Locked locked;
  const auto found = look.handle()(with_tensors).cast<py::tuple>();
  detail::Subtree result;
  for (const auto item : found[0].cast<py::list>()) {
    const auto node = item.cast<py::tuple>();
    result.nodes.push_back(
        {node[0].cast<std::string>(), py::object(node[1]).ptr(),
         node[2].cast<std::shared_ptr<ModuleState>>()->engine()});
  }
  result.params = found[1].cast<std::vector<std::pair<std::string, at::Tensor>>>();
  return result;
}

} // namespace

ModuleState::ModuleState(
    const std::string& name,
    const std::vector<py::object>& modules,
    const std::string& device_type,
    const GivenGroup& world,
    const std::vector<GroupSpec>& groups,
    const PolicySpec& policy,
    bool auto_reshard,
    py::object look) {
  std::vector<const void*> addresses;
  for (const auto& module : modules) {
    addresses.push_back(module.ptr());
  }
  engine_ = std::make_shared<FSDPState>(
      name, std::move(addresses), detail::current_device(c10::Device(device_type).type()),
      make_groups(name, groups, world, policy),
      [look = Reference(std::move(look))](bool with_tensors) {
        return subtree_of(look, with_tensors);
      });
  engine_->auto_reshard_after_forward = auto_reshard;
  engine_->checks_graph = false; // a module notices itself when a parameter is replaced
  engine_->precision = policy.precision;
}

detail::FSDPParam& ModuleState::param(size_t group, size_t param) const {
  return *engine_->groups().at(group)->params().at(param);
}

at::Tensor ModuleState::shard(size_t group, size_t index) const {
  return param(group, index).sharded();
}

void ModuleState::bind(
    size_t group,
    size_t index,
    py::object whole,
    py::object pieces,
    py::object dtensor,
    const py::list& sites,
    py::object extension) {
  std::vector<Site> all;
  for (const auto item : sites) {
    const auto pair = item.cast<py::tuple>();
    all.push_back({Reference(py::object(pair[0])), Reference(py::object(pair[1]))});
  }
  auto& bound = param(group, index);
  if (extension.is_none()) {
    bound.set_user(std::make_shared<DTensorParam>(
        bound.name(), std::move(whole), std::move(pieces), std::move(dtensor), std::move(all)));
    return;
  }
  auto opaque = std::make_shared<OpaqueParam>(
      bound.name(), std::move(whole), std::move(pieces), std::move(dtensor), std::move(all),
      std::move(extension));
  bound.set_user(opaque);
  bound.extension = std::move(opaque);
}

py::object ModuleState::pre_forward(PyObject* module, PyObject* args, PyObject* kwargs) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode),
      "[fully_shard] transforms of torch.func (grad, jvp, vmap) cannot go through ",
      detail::module_text(engine_->name()), "; use autograd");
  const detail::CallSite site{engine_, module};
  if (!detail::ForwardScope::needed(site)) {
    calls_.push_back({module, nullptr});
    return py::none();
  }
  auto scope = std::make_unique<detail::ForwardScope>(site);
  const auto& precision = engine_->precision;
  auto tensors = TensorTree::of_arguments(
      precision.cast_forward_inputs ? precision.param_dtype : std::nullopt);
  tensors.add(args);
  tensors.add(kwargs);
  scope->inputs(tensors.pointers());
  calls_.push_back({module, std::move(scope)});
  if (!tensors.was_replaced()) {
    return py::none();
  }
  auto new_args = tensors.rebuilt(args);
  return py::make_tuple(new_args, tensors.rebuilt(kwargs));
}

py::object ModuleState::post_forward(PyObject* module, PyObject* output) {
  TORCH_INTERNAL_ASSERT(
      !calls_.empty() && calls_.back().module == module, "a forward ended that had not begun");
  const auto call = std::move(calls_.back());
  calls_.pop_back();
  if (!call.scope) {
    return py::none();
  }
  auto tensors = TensorTree::of_results();
  tensors.add(output);
  call.scope->outputs(tensors.pointers());
  return tensors.was_replaced() ? tensors.rebuilt(output) : py::none();
}

void ModuleState::forward_failed(PyObject* module, bool stopped) {
  if (calls_.empty() || calls_.back().module != module) {
    return;
  }
  const auto call = std::move(calls_.back());
  calls_.pop_back();
  if (stopped && call.scope) {
    call.scope->outputs({});
  }
}

void ModuleState::reset() {
  calls_.clear();
  engine_->reset();
}

void ModuleState::show_shards() const {
  const auto& groups = engine_->groups();
  if (std::any_of(groups.begin(), groups.end(), [](const auto& group) {
        return group->state() != detail::ParamsState::Sharded;
      })) {
    engine_->reshard();
  }
}

void ModuleState::adopt() const {
  for (const auto& group : engine_->groups()) {
    group->adopt();
  }
}

// ------------------------------------------------------------ Hooks

namespace {

constexpr const char* kCapsule = "fsdp_cpp.state";

ModuleState& state_of(PyObject* capsule) {
  return **static_cast<std::shared_ptr<ModuleState>*>(PyCapsule_GetPointer(capsule, kCapsule));
}

void check_arguments(Py_ssize_t num_args) {
  TORCH_CHECK_TYPE(num_args == 3, "a hook of a forward takes 3 arguments, not ", num_args);
}

PyObject* pre_hook(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  HANDLE_TH_ERRORS
  check_arguments(num_args);
  return state_of(self).pre_forward(args[0], args[1], args[2]).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* post_hook(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  HANDLE_TH_ERRORS
  check_arguments(num_args);
  return state_of(self).post_forward(args[0], args[2]).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyMethodDef pre_hook_definition{
    "fsdp_pre_forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(pre_hook)),
    METH_FASTCALL, nullptr};
PyMethodDef post_hook_definition{
    "fsdp_post_forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(post_hook)),
    METH_FASTCALL, nullptr};

} // namespace

py::tuple forward_hooks(const std::shared_ptr<ModuleState>& state) {
  const auto capsule =
      checked(PyCapsule_New(new std::shared_ptr<ModuleState>(state), kCapsule, [](PyObject* self) {
        delete static_cast<std::shared_ptr<ModuleState>*>(PyCapsule_GetPointer(self, kCapsule));
      }));
  return py::make_tuple(
      checked(PyCFunction_New(&pre_hook_definition, capsule.ptr())),
      checked(PyCFunction_New(&post_hook_definition, capsule.ptr())));
}

} // namespace fsdp::python
