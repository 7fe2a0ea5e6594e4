#include <fsdp/hooked.h>
#include <fsdp/tensor_parallel.h>

#include <ATen/ATen.h>
#include <fnmatch.h>

#include <map>
#include <memory>
#include <set>
#include <utility>

#include "base/text.h"
#include "layout/shard_layout.h"
#include "module/module_tree.h"
#include "parallel/local_move.h"
#include "parallel/styles.h"
#include "param/tensor_piece.h"
#include "runtime/autograd_compat.h"
#include "runtime/stream.h"

namespace fsdp {

using detail::divides;
using detail::ParamDivision;
using detail::StyledModule;
using detail::TensorPiece;

namespace {

// ------------------------------------------------------------ Which modules

/// Finds the modules that a path of the plan matches.
class Search {
 public:
  Search(torch::nn::Module& root, const DeviceMesh& mesh, const std::string& path)
      : mesh_(mesh), parts_(path.empty() ? Names() : detail::split(path, '.')) {
    descend("", root, 0);
    TORCH_CHECK_VALUE(
        !found_.empty(), detail::kParallelizeTag, "the plan for ", detail::axis_text(mesh),
        " names '", path, "', but there is no such module in ", detail::type_name(root), ": ",
        mismatch_);
  }
  const std::vector<StyledModule>& found() const {
    return found_;
  }

 private:
  using Names = std::vector<std::string>;

  void descend(const std::string& name, torch::nn::Module& module, size_t depth) {
    if (depth == parts_.size()) {
      if (seen_.insert(&module).second) { // a module may be registered twice
        found_.push_back({name, &module, mesh_});
      }
      return;
    }
    bool any = false;
    for (const auto& child : module.named_children()) {
      if (fnmatch(parts_[depth].c_str(), child.key().c_str(), 0) == 0) {
        any = true;
        descend(detail::join_names(name, child.key()), *child.value(), depth + 1);
      }
    }
    if (!any && (mismatch_.empty() || depth > deepest_)) {
      deepest_ = depth;
      mismatch_ = c10::str(
          "'", parts_[depth], "' is none of the modules in ",
          StyledModule{name, &module, mesh_}.text(), ": ",
          detail::join(module.named_children().keys()));
    }
  }

  const DeviceMesh mesh_;
  const Names parts_;
  std::set<const torch::nn::Module*> seen_;
  std::vector<StyledModule> found_;
  size_t deepest_ = 0;
  std::string mismatch_;
};

Hookable& hooked(const StyledModule& at) {
  auto* hookable = dynamic_cast<Hookable*>(at.module);
  TORCH_CHECK_VALUE(
      hookable && hookable->fsdp_has_forward(), detail::kParallelizeTag, at.text(),
      hookable ? " has no forward" : " is not hooked", ", so that for ", detail::axis_text(at.mesh),
      " its inputs and outputs cannot be converted. Declare its holder with FSDP_MODULE instead of "
      "TORCH_MODULE, or take the one of fsdp::nn");
  return *hookable;
}

/// A plan entry together with one of the modules that it matches.
struct Target {
  StyledModule at;
  const ParallelStyle* style;
  std::vector<ParamDivision> divisions;
};

std::vector<Target> targets_of(
    torch::nn::Module& root, const DeviceMesh& mesh, const ParallelPlan& plan) {
  std::vector<Target> targets;
  std::set<const torch::nn::Module*> divided;
  std::set<std::pair<const torch::nn::Module*, std::string>> prepared;
  for (const auto& [path, style] : plan.entries()) {
    const Search search(root, mesh, path);
    for (const auto& at : search.found()) {
      for (const auto& hook : hooked(at).fsdp_hooks) {
        TORCH_CHECK_VALUE(
            !divides(style) || !hook.divides_params, detail::kParallelizeTag, at.text(),
            " has been parallelized already, by ", hook.name, ", and cannot be again, over ",
            detail::axis_text(mesh));
      }
      TORCH_CHECK_VALUE(
          !divides(style) || divided.insert(at.module).second, detail::kParallelizeTag, at.text(),
          " is parallelized by two entries of the plan for ", detail::axis_text(mesh));
      for (const auto* side : detail::prepared_sides(style)) {
        TORCH_CHECK_VALUE(
            prepared.emplace(at.module, side).second, detail::kParallelizeTag, "the ", side, " of ",
            at.text(), " is prepared by two entries of the plan for ", detail::axis_text(mesh));
      }
      targets.push_back({at, &style, detail::param_divisions(at, style)});
    }
  }
  return targets;
}

// ------------------------------------------------------------ Checks

void check_dividable(
    const StyledModule& at,
    const std::string& name,
    const at::Tensor& param,
    const std::vector<Placement>& placements) {
  TORCH_CHECK_VALUE(
      !detail::FSDPParam::find(param), detail::kParallelizeTag, "parameter '", name, "' of ",
      at.text(), " is sharded by fully_shard already, and cannot be divided over ", at.mesh.str(),
      ": parallelize_module comes before fully_shard");
  const auto piece = TensorPiece::find(param);
  TORCH_CHECK_VALUE(
      !piece || (piece->spec().mesh == at.mesh && piece->spec().placements == placements),
      detail::kParallelizeTag, "parameter '", name, "' of ", at.text(), " lies ",
      piece ? to_string(piece->spec().placements) + " on " + piece->spec().mesh.str() : "",
      " already, and cannot lie ", to_string(placements), " on ", at.mesh.str());
}

/// Returns the divisions by parameter. A parameter that several modules share is divided once.
using Divisions = std::map<const at::TensorImpl*, const ParamDivision*>;
Divisions check_divisions(const std::vector<Target>& targets) {
  Divisions all;
  for (const auto& [at, style, divisions] : targets) {
    for (const auto& division : divisions) {
      check_dividable(at, division.name, division.param, {division.placement});
      const auto known = TensorPiece::find(division.param);
      TORCH_CHECK_VALUE(
          !known || !known->sum_grad || division.sum_grads, detail::kParallelizeTag,
          "the gradient of parameter '", division.name, "' is summed over ",
          detail::axis_text(at.mesh), " already, for a module that has part of the sequence; ",
          at.text(), " has all of it");
      const auto& other =
          *all.emplace(division.param.unsafeGetTensorImpl(), &division).first->second;
      TORCH_CHECK_VALUE(
          other.placement == division.placement && other.sum_grads == division.sum_grads,
          detail::kParallelizeTag, "parameters '", other.name, "' and '", division.name,
          "' are one, which ", detail::axis_text(at.mesh), " cannot place as ",
          to_string(other.placement), " and as ", to_string(division.placement));
    }
  }
  return all;
}

/// Throws ValueError if a module outside of the plan shares a divided parameter: it would compute
/// as if it still had the whole parameter.
void check_shared(
    torch::nn::Module& root, const std::vector<Target>& targets, const Divisions& divisions) {
  std::set<const torch::nn::Module*> planned_modules;
  for (const auto& target : targets) {
    if (divides(*target.style)) {
      detail::walk(
          *target.at.module, [&](const auto&, const auto& at) { planned_modules.insert(&at); });
    }
  }
  detail::walk(root, [&](const std::string& name, torch::nn::Module& module) {
    const auto* hookable = dynamic_cast<const Hookable*>(&module);
    for (size_t i = 0; hookable && i < hookable->fsdp_hooks.size(); ++i) {
      if (hookable->fsdp_hooks[i].divides_params) { // divided by an earlier plan
        planned_modules.insert(&module);
      }
    }
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const auto found = divisions.find(item.value().unsafeGetTensorImpl());
      TORCH_CHECK_VALUE(
          found == divisions.end() || planned_modules.contains(&module), detail::kParallelizeTag,
          "parameter '", detail::join_names(name, item.key()), "' is shared with '",
          found->second->name, "', which ", detail::axis_text(targets.front().at.mesh),
          " is to place as ", to_string(found->second->placement),
          ". Put both modules into one plan, with styles that agree: RowwiseParallel of an "
          "Embedding and ColwiseParallel of a Linear do");
    }
  });
}

// ------------------------------------------------------------ Parameters

/// Replaces the tensor's content by this rank's piece, in place, so that all its holders see it.
std::shared_ptr<TensorPiece> make_piece(
    const at::Tensor& param, const std::string& name, const detail::TensorSpec& spec) {
  at::NoGradGuard no_grad;
  const auto whole = param.detach();
  const auto& mesh = spec.mesh;
  if (param.is_meta()) {
    const auto sizes =
        detail::local_sizes(spec.sizes, spec.placements, mesh.shape(), mesh.get_coordinate());
    param.set_data(at::empty(sizes, whole.options()));
  } else {
    const auto device = detail::current_device(mesh.device_type());
    param.set_data(detail::distribute(whole.to(device), spec));
  }
  param.mutable_grad().reset();
  if (param.requires_grad()) { // an existing graph has an accumulator of the old sizes
    torch::autograd::impl::set_grad_accumulator(param, detail::weak_node(detail::NodePtr()));
  }
  return std::make_shared<TensorPiece>(param, name, spec);
}

/// Each rank computes one term of the parameter's gradient: a hook sums them. Where fully_shard
/// reduces gradients in another dtype, it sums them in that dtype instead.
void sum_gradients(const ParamDivision& division, const DeviceMesh& mesh, TensorPiece& piece) {
  const detail::LocalMove move{mesh, Partial{}, Replicate{}};
  const detail::MoveLabel label{
      detail::kParallelizeTag + ("the gradient of '" + division.name + "'"), division.name};
  const auto& param = division.param;
  const bool requires_grad = param.requires_grad();
  param.set_requires_grad(true); // register_hook needs this, also for a frozen parameter
  piece.sum_grad = [move, label](const at::Tensor& grad) {
    return detail::move_local(grad, move, label);
  };
  const auto* impl = param.unsafeGetTensorImpl(); // which owns the hook
  param.register_hook([sum = piece.sum_grad, impl](const at::Tensor& grad) {
    const auto* managed = detail::FSDPParam::find(impl);
    const bool is_left = !grad.defined() || (managed && managed->sums_itself(grad));
    return is_left ? grad : sum(grad);
  });
  param.set_requires_grad(requires_grad);
}

using TensorPieces = std::vector<std::shared_ptr<TensorPiece>>;

TensorPieces divide(const Target& target) {
  TensorPieces pieces;
  for (const auto& division : target.divisions) {
    auto known = TensorPiece::find(division.param); // not null if shared with another module
    if (!known) {
      const auto sizes = division.param.sizes().vec();
      known =
          make_piece(division.param, division.name, {target.at.mesh, {division.placement}, sizes});
    }
    if (division.sum_grads && !known->sum_grad) {
      sum_gradients(division, target.at.mesh, *known);
    }
    pieces.push_back(std::move(known));
  }
  return pieces;
}

} // namespace

void parallelize_module(ModuleRef module, const DeviceMesh& mesh, const ParallelPlan& plan) {
  TORCH_CHECK_VALUE(
      mesh.ndim() == 1, detail::kParallelizeTag, "needs a mesh of one axis, not ", mesh.str(),
      "; take a slice of it: mesh[\"tp\"]");
  detail::check_members(*module);
  const auto targets = targets_of(*module, mesh, plan);
  check_shared(*module, targets, check_divisions(targets));
  for (const auto& target : targets) { // in the plan's order, which is the same on every rank
    auto pieces = std::make_shared<const TensorPieces>(divide(target));
    auto& hooks = hooked(target.at).fsdp_hooks;
    for (auto& hook : detail::forward_hooks(target.at, *target.style)) {
      hook.keeps = pieces;
      hooks.push_back(std::move(hook));
    }
  }
}

void distribute_parameter(
    ModuleRef module,
    const std::string& name,
    const DeviceMesh& mesh,
    std::vector<Placement> placements) {
  const StyledModule at{"", &*module, mesh};
  const auto params = module->named_parameters(/*recurse=*/false);
  const auto* param = params.find(name);
  TORCH_CHECK_VALUE(
      param, detail::kParallelizeTag, at.text(), " has no parameter '", name, "' to divide over ",
      mesh.str(), "; it has ", detail::join(params.keys()));
  placements = detail::normalized(std::move(placements), param->dim(), mesh.ndim());
  detail::check_members(*module);
  check_dividable(at, name, *param, placements);
  TORCH_CHECK_VALUE(
      !TensorPiece::find(*param), detail::kParallelizeTag, "parameter '", name, "' of ", at.text(),
      " is divided over ", mesh.str(), " already");
  auto& hooks = hooked(at).fsdp_hooks;
  const detail::TensorSpec spec{mesh, std::move(placements), param->sizes().vec()};
  hooks.push_back({.name = "distribute_parameter", .keeps = make_piece(*param, name, spec)});
}

void distribute_module(ModuleRef module, const DeviceMesh& mesh) {
  const StyledModule at{"", &*module, mesh};
  detail::check_members(*module);
  auto& hooks = hooked(at).fsdp_hooks;
  const std::vector<Placement> replicated(mesh.ndim(), Replicate{});
  const auto params = detail::distinct_parameters(*module);
  for (const auto& [name, param] : params) {
    if (!TensorPiece::find(param)) {
      check_dividable(at, name, param, replicated);
    }
  }
  auto pieces = std::make_shared<TensorPieces>();
  for (const auto& [name, param] : params) {
    if (!TensorPiece::find(param)) {
      pieces->push_back(make_piece(param, name, {mesh, replicated, param.sizes().vec()}));
    }
  }
  hooks.push_back({.name = "distribute_module", .keeps = std::move(pieces)});
}

} // namespace fsdp
