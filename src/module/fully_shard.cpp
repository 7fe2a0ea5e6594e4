#include <fsdp/distributed.h>
#include <fsdp/fully_shard.h>
#include <fsdp/param.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/text.h"
#include "module/module_tree.h"
#include "param/tensor_piece.h"

namespace fsdp {

using detail::FSDPParam;
using detail::FSDPParamGroup;
using detail::FSDPState;

int ReshardAfterForward::ranks(int size) const {
  if (kind_ != Kind::Ranks) {
    return kind_ == Kind::No ? 0 : size;
  }
  TORCH_CHECK_VALUE(
      ranks_ >= 1 && ranks_ <= size && size % ranks_ == 0,
      "[fully_shard] reshard_after_forward = ", ranks_,
      " should be a factor of the number of ranks, ", size);
  if (ranks_ == 1 && size > 1) {
    TORCH_WARN_ONCE(
        "[fully_shard] reshard_after_forward = 1 keeps the parameters whole, as false does; say "
        "true to free them");
    return 0;
  }
  return static_cast<int>(ranks_);
}

namespace {

// ------------------------------------------------------------ Validation

void check_module(const ModuleRef& module, const char* function) {
  const auto type = detail::type_name(*module);
  const auto* hookable = dynamic_cast<const Hookable*>(&*module);
  const bool is_container = dynamic_cast<const torch::nn::ModuleListImpl*>(&*module) ||
                            dynamic_cast<const torch::nn::ModuleDictImpl*>(&*module);
  TORCH_CHECK_VALUE(
      hookable ? hookable->fsdp_has_forward() : !is_container,
      "[fully_shard] does not support containers that do not implement forward: ", type,
      "; shard its elements, or all of them as one group: fully_shard({a, b})");
  TORCH_CHECK_VALUE(
      hookable || module.is_by_call(), "[fully_shard] ", type,
      " is not hooked, so its forward cannot be intercepted. Declare its holder with FSDP_MODULE "
      "instead of TORCH_MODULE, take the one of fsdp::nn, or shard it by_call and run it by "
      "fsdp::call. A module that LibTorch builds inside another cannot be hooked: shard the outer "
      "one");
  TORCH_CHECK_VALUE(
      hookable || !module->weak_from_this().expired(), "[fully_shard] by_call needs a ", type,
      " that a holder or a shared_ptr owns");
  TORCH_CHECK_VALUE(
      !detail::state_of(*module), "[", function, "] can only be applied to a module once: this ",
      type, " is already managed by fully_shard or replicate");
}

void check_precision(const MixedPrecisionPolicy& policy, const std::string& name) {
  const auto check = [&](const auto& dtype, const char* field) {
    TORCH_CHECK_VALUE(
        !dtype || at::isFloatingType(*dtype), "[fully_shard] mp_policy.", field, " of '", name,
        "' is ", dtype ? c10::toString(*dtype) : "",
        ", which is not a floating point type; take kBFloat16, kHalf or kFloat, or leave it out");
  };
  TORCH_CHECK_VALUE(
      !policy.reduce_dtype || c10::elementSize(*policy.reduce_dtype) > 1,
      "[fully_shard] mp_policy.reduce_dtype of '", name, "' is ",
      c10::toString(policy.reduce_dtype.value_or(at::kFloat)),
      ", in which sums cannot be computed; take kBFloat16, kHalf or kFloat");
  check(policy.param_dtype, "param_dtype");
  check(policy.reduce_dtype, "reduce_dtype");
  check(policy.output_dtype, "output_dtype");
}

// ------------------------------------------------------------ Parameters and groups

/// Returns the modules that are not inside another module of the list, each once.
std::vector<ModuleRef> outermost(const std::vector<ModuleRef>& modules) {
  std::unordered_set<const torch::nn::Module*> inside;
  for (const auto& module : modules) {
    detail::walk(*module, [&](const std::string& name, torch::nn::Module& each) {
      if (!name.empty()) {
        inside.insert(&each);
      }
    });
  }
  std::vector<ModuleRef> result;
  for (const auto& module : modules) {
    if (inside.insert(&*module).second) {
      result.push_back(module);
    }
  }
  return result;
}

struct Candidate {
  std::string name;
  at::Tensor param;
};

/// Returns the parameters that are neither managed nor ignored, each once even if it is shared.
std::vector<Candidate> unmanaged_params(
    const std::vector<ModuleRef>& modules, const FullyShardOptions& options) {
  std::unordered_set<const at::TensorImpl*> taken;
  for (const auto& param : options.ignored_params) {
    taken.insert(param.unsafeGetTensorImpl());
  }
  for (const auto& module : modules) {
    for (const auto& node : detail::subtree_of(*module).nodes) {
      for (const auto& group : node.state->groups()) {
        for (const auto& param : group->params()) {
          taken.insert(param->tensor().unsafeGetTensorImpl());
        }
      }
    }
  }
  std::vector<Candidate> result;
  for (const auto& module : modules) {
    for (auto& [name, param] : detail::named_parameters(*module)) {
      if (!taken.insert(param.unsafeGetTensorImpl()).second) {
        continue;
      }
      const auto* other = FSDPParam::find(param);
      TORCH_CHECK_VALUE(
          !other, "[fully_shard] parameter '", name, "' of ", detail::type_name(*module),
          " is shared with '", other ? other->name() : "",
          "', which is already managed by another FSDP group. For shared parameters, put both "
          "modules in one call of fully_shard");
      result.push_back({name, param});
    }
  }
  return result;
}

/// The device type for a model without memory: the accelerator, or the CPU if there is none.
c10::DeviceType default_device_type() {
  return detail::accelerator_type().value_or(c10::kCPU);
}

DeviceMesh mesh_of(const FullyShardOptions& options, const std::vector<Candidate>& params) {
  if (options.mesh) {
    return *options.mesh;
  }
  const auto device = params.empty() ? c10::Device(c10::kMeta) : params.front().param.device();
  return init_device_mesh(
      device.is_meta() ? default_device_type() : device.type(), {get_world_size()});
}

/// Moves the tensor in place, so that all its holders see it there.
void move_to(const at::Tensor& tensor, c10::Device device) {
  if (tensor.defined() && !tensor.is_meta() && tensor.device() != device) {
    at::NoGradGuard no_grad;
    tensor.set_data(tensor.detach().to(device));
  }
}

void move_buffers(const std::vector<ModuleRef>& modules, c10::Device device) {
  for (const auto& module : modules) {
    for (const auto& buffer : module->buffers(/*recurse=*/true)) {
      move_to(buffer, device);
    }
  }
}

/// Runs `call`. Adds `whom` to an error that it throws.
template <class F>
auto with_error_context(const std::string& whom, F call) {
  try {
    return call();
  } catch (c10::Error& error) {
    error.add_context(whom);
    throw;
  }
}

/// The mesh over which parameters with fewer than `min_shard_numel` elements are replicated. Empty
/// if this option has no effect.
std::optional<detail::DataParallelMesh> mesh_of_small_params(
    const detail::DataParallelMesh& mesh, const FullyShardOptions& options) {
  if (options.min_shard_numel <= 0 || !mesh.shard_axis || mesh.shard_group.size() == 1) {
    return std::nullopt;
  }
  return mesh.all_replicated();
}

/// The number of elements of the whole parameter, even if this rank has only a piece of it.
int64_t whole_numel(const at::Tensor& param) {
  const auto piece = detail::TensorPiece::find(param);
  return piece ? c10::multiply_integers(piece->spec().sizes) : param.numel();
}

/// The bytes of one rank's shards, their gradients and the states of an optimizer: the same on all
/// ranks that shard the parameters together.
int64_t bytes_between_steps(
    const std::vector<detail::ParamSpec>& params,
    const detail::DataParallelMesh& over,
    int num_states) {
  int64_t bytes = 0;
  for (const auto& [param, name, dim, opaque, merged_dims] : params) {
    const auto geometry = detail::shard_geometry(
        name, param.sizes().vec(), dim, over.shard_group.size(), over.shard_group.rank(),
        merged_dims);
    const auto copies = param.requires_grad() ? 2 + num_states : 1;
    bytes += copies * geometry.padded_numel * static_cast<int64_t>(param.element_size());
  }
  return bytes;
}

/// The policy of one group: it is not offloaded if it fits into the budget.
AnyOffloadPolicy offload_policy_of(
    const std::vector<detail::ParamSpec>& params,
    const detail::DataParallelMesh& over,
    const AnyOffloadPolicy& policy) {
  const auto* offload = std::get_if<CPUOffloadPolicy>(&policy);
  if (!offload || !offload->budget) {
    return policy;
  }
  const auto& budget = *offload->budget;
  const bool fits = budget.take(bytes_between_steps(params, over, budget.states()));
  return fits ? AnyOffloadPolicy(OffloadPolicy{}) : policy;
}

/// Makes one group per mesh, in the order in which the parameters use the meshes.
FSDPState::Groups make_groups(
    const std::vector<Candidate>& params,
    const detail::DataParallelMesh& mesh,
    const FullyShardOptions& options,
    const std::string& name) {
  std::vector<std::pair<detail::DataParallelMesh, std::vector<detail::ParamSpec>>> by_mesh;
  const auto replicas = mesh_of_small_params(mesh, options);
  for (const auto& [param_name, param] : params) {
    const auto placement =
        options.shard_placement_fn ? options.shard_placement_fn(param_name, param) : std::nullopt;
    const bool is_small = !placement && whole_numel(param) < options.min_shard_numel;
    const auto over = with_error_context("parameter '" + param_name + "' of " + name, [&] {
      return placement && placement->mesh ? detail::DataParallelMesh(*placement->mesh)
             : replicas && is_small       ? *replicas
                                          : mesh;
    });
    auto found = std::find_if(by_mesh.begin(), by_mesh.end(), [&](const auto& item) {
      return item.first.shard_group == over.shard_group &&
             item.first.replicate_group == over.replicate_group;
    });
    if (found == by_mesh.end()) {
      found = by_mesh.insert(by_mesh.end(), {over, {}});
    }
    found->second.push_back(
        {.param = param,
         .name = param_name,
         .shard_dim = placement ? placement->dim : 0,
         .merged_dims = placement && over.shard_axis ? placement->merged_dims : 1});
  }
  const auto is_of_small_params = [&](const detail::DataParallelMesh& over) {
    return replicas && !over.shard_axis;
  };
  const auto ranks_after_forward = [&](const detail::DataParallelMesh& over) {
    const auto size = over.shard_group.size(); // 1 for small parameters, which are not divided
    return is_of_small_params(over) ? size : options.reshard_after_forward.ranks(size);
  };
  for (const auto& [over, specs] : by_mesh) { // all checks come before the first change
    (void)ranks_after_forward(over);
    for (const auto& spec : specs) {
      detail::check_shardable(spec, over);
      TORCH_CHECK_VALUE(
          spec.param.is_meta() == specs.front().param.is_meta(), "[fully_shard] of ", name,
          ", parameter '", (spec.param.is_meta() ? spec : specs.front()).name,
          "' is on the meta device and '", (spec.param.is_meta() ? specs.front() : spec).name,
          "' is not; give all of them memory (to_empty), or none");
    }
  }
  FSDPState::Groups groups;
  for (const auto& [over, specs] : by_mesh) {
    const auto offload = offload_policy_of(specs, over, options.offload_policy);
    const bool on_host = std::holds_alternative<CPUOffloadPolicy>(offload);
    const auto home = on_host ? at::kCPU : detail::current_device(over.mesh.device_type());
    for (const auto& spec : specs) {
      move_to(spec.param, home);
    }
    const detail::GroupPolicy policy{
        options.mp_policy, offload,
        /*from_first_replica=*/is_of_small_params(over)};
    auto group = std::make_shared<FSDPParamGroup>(specs, over, name, policy);
    group->set_ranks_after_forward(ranks_after_forward(over));
    groups.push_back(std::move(group));
  }
  return groups;
}

} // namespace

// ------------------------------------------------------------ fully_shard

namespace {

enum class Kind : std::uint8_t { FullyShard, Replicate };

FSDPModule shard_or_replicate(
    const std::vector<ModuleRef>& modules, const FullyShardOptions& options, Kind kind) {
  TORCH_CHECK_VALUE(!modules.empty(), "[fully_shard] the list of modules is empty");
  const bool replicated = kind == Kind::Replicate;
  for (const auto& module : modules) {
    check_module(module, replicated ? "replicate" : "fully_shard");
    detail::check_members(*module);
  }
  const auto roots = outermost(modules);
  std::vector<std::string> types;
  std::vector<const void*> addresses;
  for (const auto& root : roots) {
    types.push_back(detail::type_name(*root));
    addresses.push_back(&*root);
  }
  const auto name = detail::join(types);
  const auto params = unmanaged_params(roots, options);
  const auto device_mesh = mesh_of(options, params);
  const auto& dims = options.dp_mesh_dims;
  TORCH_CHECK_NOT_IMPLEMENTED(
      !dims || !options.reshard_after_forward.is_number(),
      "[fully_shard] reshard_after_forward as int is not supported with dp_mesh_dims");
  const auto mesh = with_error_context(name, [&] {
    return replicated ? detail::DataParallelMesh::replicated(device_mesh, dims)
                      : detail::DataParallelMesh(device_mesh, dims);
  });
  const auto device = detail::current_device(device_mesh.device_type());
  (void)options.reshard_after_forward.ranks(mesh.shard_group.size()); // also without parameters
  check_precision(options.mp_policy, name);
  auto groups = make_groups(params, mesh, options, name);
  move_buffers(roots, device);
  auto state = std::make_shared<FSDPState>(
      name, std::move(addresses), device, std::move(groups), detail::subtree_function(roots));
  state->auto_reshard_after_forward = options.reshard_after_forward.is_auto();
  state->precision = options.mp_policy;
  state->ignored_params = options.ignored_params;
  for (const auto& root : roots) {
    detail::set_state(*root, state);
  }
  return FSDPModule(state);
}

} // namespace

FSDPModule detail::fully_shard_all(
    const std::vector<ModuleRef>& modules, const FullyShardOptions& options) {
  return shard_or_replicate(modules, options, Kind::FullyShard);
}

FSDPModule replicate(ModuleRef module, const ReplicateOptions& options) {
  return shard_or_replicate(
      {module},
      {.mesh = options.mesh,
       .mp_policy = options.mp_policy,
       .offload_policy = options.offload_policy,
       .ignored_params = options.ignored_params,
       .dp_mesh_dims = options.dp_mesh_dims},
      Kind::Replicate);
}

FSDPModule fully_shard(ModuleRef module, const FullyShardOptions& options) {
  return detail::fully_shard_all({module}, options);
}

FSDPModule fully_shard(std::initializer_list<ModuleRef> modules, const FullyShardOptions& options) {
  return detail::fully_shard_all(modules, options);
}

torch::OrderedDict<std::string, DTensor> named_dtensors(ModuleRef module) {
  torch::OrderedDict<std::string, DTensor> result;
  for (const auto& [name, param] : detail::distinct_parameters(*module)) {
    if (FSDPParam::find(param) || detail::TensorPiece::find(param)) {
      result.insert(name, as_dtensor(param));
    }
  }
  return result;
}

ShardingPlan sharding_plan(ModuleRef module) {
  auto plan = FSDPState::plan_of(detail::subtree_of(*module));
  TORCH_CHECK_VALUE(
      !plan.groups.empty(), "[sharding_plan] nothing in this ", detail::type_name(*module),
      " is sharded; call fully_shard first");
  return plan;
}

} // namespace fsdp
