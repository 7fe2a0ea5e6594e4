#include <fsdp/meta_init.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "base/text.h"
#include "module/module_tree.h"
#include "param/tensor_piece.h"
#include "param/unfilled.h"
#include "runtime/autograd_compat.h"
#include "runtime/op_interceptor.h"
#include "runtime/seeded_draws.h"

namespace fsdp {

using detail::FSDPParam;

namespace {

// ------------------------------------------------------------ Operators

/// Makes factory functions that are given no device return meta tensors, like Python's
/// `with torch.device("meta")`.
class OnMeta : public detail::OpInterceptor {
 public:
  void before(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    const detail::OpArguments arguments(op, stack);
    c10::IValue* device = nullptr;
    for (size_t i = 0; i < arguments.schema.size(); ++i) {
      if (arguments.values[i].isTensor() || arguments.values[i].isTensorList()) {
        return; // the result is on the tensor's device
      }
      if (arguments.is_left_out(i, c10::TypeKind::DeviceObjType)) {
        device = &arguments.values[i];
      }
    }
    if (device) {
      *device = c10::Device(c10::kMeta);
    }
  }
};

/// FNV-1a, because std::hash may differ between builds.
uint64_t hash(uint64_t seed, const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&hash](uint64_t byte) { hash = (hash ^ (byte & 0xff)) * 0x100000001b3; };
  for (int shift = 0; shift < 64; shift += 8) {
    add(seed >> shift);
  }
  for (const char c : name) {
    add(static_cast<unsigned char>(c));
  }
  return hash ^ (hash >> 32); // the CPU's generator uses 32 bits only
}

// ------------------------------------------------------------ Tensors

/// Gives a meta tensor memory, in place, so that all its holders see it. set_data does the same but
/// refuses to leave the meta device.
void give_memory(const at::Tensor& tensor, c10::Device device) {
  const auto fresh = at::empty_like(tensor, tensor.options().device(device));
  tensor.unsafeGetTensorImpl()->shallow_copy_from(fresh.getIntrusivePtr());
  if (tensor.requires_grad()) { // drops what a backward on meta left
    tensor.mutable_grad().reset();
    torch::autograd::impl::set_grad_accumulator(tensor, detail::weak_node(detail::NodePtr()));
  }
}

/// Gives memory to all tensors of the module that have none, each on `device_of` it.
template <class DeviceOf>
void allocate(torch::nn::Module& module, const DeviceOf& device_of) {
  at::NoGradGuard no_grad;
  c10::InferenceMode not_inference(false);
  for (const auto& tensors : {detail::named_parameters(module), detail::named_buffers(module)}) {
    for (const auto& [name, tensor] : tensors) {
      if (tensor.is_meta()) { // false at the second name of a shared tensor
        give_memory(tensor, device_of(tensor));
        detail::set_unfilled(tensor);
      }
    }
  }
}

void check_initializable(const std::vector<std::pair<std::string, at::Tensor>>& params) {
  std::vector<std::string> on_meta;
  for (const auto& [name, param] : params) {
    if (param.is_meta()) {
      on_meta.push_back(name);
    }
    const auto* sharded = FSDPParam::find(param);
    TORCH_CHECK_VALUE(
        !sharded || sharded->face() == detail::Face::Sharded, "[init_parameters] parameter '", name,
        "' is unsharded; reshard() its module first");
  }
  TORCH_CHECK_VALUE(
      on_meta.empty(),
      "[init_parameters] these have no memory, on the meta device: ", detail::join(on_meta),
      "; call to_empty first");
}

} // namespace

// ------------------------------------------------------------ Public

MetaInit::MetaInit() : interceptor_(std::make_unique<OnMeta>()) {}
MetaInit::~MetaInit() = default;

void to_empty(ModuleRef module, c10::Device device) {
  TORCH_CHECK_VALUE(
      !device.is_meta(), "[to_empty] the meta device has no memory: name the one to train on");
  allocate(*module, [&](const at::Tensor&) { return device; });
}

void to_empty(ModuleRef module) {
  const auto nodes = detail::subtree_of(*module).nodes;
  TORCH_CHECK_VALUE(
      !nodes.empty(), "[to_empty] nothing in this ", detail::type_name(*module),
      " is sharded; call fully_shard first, or name a device");
  std::unordered_map<const at::TensorImpl*, c10::Device> homes;
  for (const auto& node : nodes) {
    for (const auto& group : node.state->groups()) {
      for (const auto& param : group->params()) {
        homes.emplace(param->tensor().unsafeGetTensorImpl(), group->home());
      }
    }
  }
  const auto device = nodes.front().state->device();
  allocate(*module, [&](const at::Tensor& tensor) {
    const auto home = homes.find(tensor.unsafeGetTensorImpl());
    return home == homes.end() ? device : home->second;
  });
}

void init_parameters(
    ModuleRef module,
    const std::function<void(const std::string& fqn, at::Tensor& param)>& fill,
    uint64_t seed) {
  TORCH_CHECK_VALUE(fill, "[init_parameters] needs a function");
  const auto params = detail::distinct_parameters(*module);
  check_initializable(params);
  at::NoGradGuard no_grad;
  for (const auto& [name, param] : params) {
    const auto* sharded = FSDPParam::find(param);
    const auto values = sharded ? sharded->shard_values() : param.detach();
    const auto piece = detail::TensorPiece::find(param);
    const at::IntArrayRef sizes = piece     ? at::IntArrayRef(piece->spec().sizes)
                                  : sharded ? at::IntArrayRef(sharded->geometry().sizes)
                                            : values.sizes();
    auto whole = at::empty(sizes, values.options());
    detail::set_unfilled(whole);
    {
      const detail::SeededDraws seeded(hash(seed, name));
      fill(name, whole);
    }
    TORCH_CHECK_VALUE(
        whole.defined() && whole.sizes() == sizes, "[init_parameters] parameter '", name,
        "' of sizes ", sizes, " was filled with another tensor");
    if (detail::is_unfilled(whole)) {
      continue; // `fill` left it alone, so the parameter keeps its values
    }
    if (piece) {
      whole = piece->piece_of(whole);
    }
    if (sharded) {
      whole = sharded->part_of(whole);
    }
    values.copy_(whole);
  }
}

} // namespace fsdp
