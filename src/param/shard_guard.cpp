#include "param/shard_guard.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "param/fsdp_param.h"
#include "runtime/op_interceptor.h"

namespace fsdp::detail {

namespace {

std::mutex groups_mutex;
std::unordered_map<const c10::StorageImpl*, GuardedShards*> groups;

thread_local int num_forwards = 0;

bool is_guarded(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(kShardKey);
}

/// The ways in which an operator uses a weight, as far as shards are concerned.
enum class Use : std::uint8_t { Harmless, Contracts, Broadcasts };

Use use_of(std::string name) {
  static const std::unordered_set<std::string_view> contracts{
      "linear",
      "cdist",
      "index",
      "index_select",
      "matmul",
      "linalg_matmul",
      "linalg_multi_dot",
      "linalg_vecdot",
      "chain_matmul",
      "kron",
      "cosine_similarity",
      "pairwise_distance",
      "mm",
      "addmm",
      "bmm",
      "baddbmm",
      "addbmm",
      "mv",
      "addmv",
      "dot",
      "vdot",
      "inner",
      "outer",
      "ger",
      "einsum",
      "tensordot",
      "bilinear",
      "conv1d",
      "conv2d",
      "conv3d",
      "conv_transpose1d",
      "conv_transpose2d",
      "conv_transpose3d",
      "conv_tbc",
      "convolution",
      "_convolution",
      "embedding",
      "embedding_bag",
      "layer_norm",
      "native_layer_norm",
      "group_norm",
      "instance_norm",
      "batch_norm",
      "rms_norm",
      "prelu",
      "lstm",
      "gru",
      "rnn_tanh",
      "rnn_relu",
      "lstm_cell",
      "gru_cell",
      "rnn_tanh_cell",
      "rnn_relu_cell",
      "scaled_dot_product_attention"};
  static const std::unordered_set<std::string_view> broadcasts{
      "add",       "sub",    "subtract",    "rsub",         "mul",         "multiply",
      "div",       "divide", "true_divide", "floor_divide", "addcmul",     "addcdiv",
      "lerp",      "where",  "maximum",     "minimum",      "max",         "min",
      "fmax",      "fmin",   "clamp",       "pow",          "float_power", "remainder",
      "fmod",      "ldexp",  "hypot",       "xlogy",        "logaddexp",   "logaddexp2",
      "atan2",     "copy",   "dist",        "mse_loss",     "l1_loss",     "smooth_l1_loss",
      "huber_loss"};
  name.erase(0, std::string_view("aten::").size());
  if (name.ends_with('_')) { // in place
    name.pop_back();
  }
  return contracts.contains(name)    ? Use::Contracts
         : broadcasts.contains(name) ? Use::Broadcasts
                                     : Use::Harmless;
}

/// Remembers the answers, because names are long to compare.
Use use_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Use> known;
  const auto [found, is_new] = known.try_emplace(&op.schema(), Use::Harmless);
  if (is_new) {
    found->second = use_of(op.operator_name().name);
  }
  return found->second;
}

/// Calls `visit(tensor, argument)` for every tensor that the operator gets.
template <class Visit>
void for_each_tensor(const OpArguments& arguments, const Visit& visit) {
  for (size_t i = 0; i < arguments.schema.size(); ++i) {
    const auto& value = arguments.values[i];
    if (value.isTensor()) {
      visit(value.toTensor(), arguments.schema[i]);
    } else if (value.isTensorList()) {
      for (const auto& item : value.toListRef()) {
        visit(item.toTensor(), arguments.schema[i]);
      }
    }
  }
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

} // namespace

/// The kernel of the guard's dispatch key.
class ShardGuard {
 public:
  static void check(const c10::OperatorHandle& op, const OpArguments& arguments) {
    const auto use = use_of(op);
    for_each_tensor(arguments, [&](const at::Tensor& tensor, const c10::Argument& argument) {
      if (!is_guarded(tensor)) {
        return;
      }
      const bool in_forward =
          num_forwards > 0 && (at::GradMode::is_enabled() || !writes(arguments));
      if (in_forward || use == Use::Contracts ||
          (use == Use::Broadcasts && grows(arguments, tensor))) {
        refuse(op, tensor);
      }
      if (is_written(argument)) {
        const std::lock_guard lock(groups_mutex);
        if (auto* group = group_of(tensor)) {
          ++group->num_writes_;
        }
      }
    });
  }

  /// Autograd saves a leaf itself, and a parameter may show its whole value when backward reads it:
  /// a penalty on shards, for example. So an operator that is recorded gets a view of the shard.
  static void give_views(const OpArguments& arguments) {
    if (!at::GradMode::is_enabled()) {
      return;
    }
    const auto is_saved = [](const at::Tensor& tensor) {
      return is_guarded(tensor) && tensor.is_leaf() && tensor.requires_grad();
    };
    for (size_t i = 0; i < arguments.schema.size(); ++i) {
      auto& value = arguments.values[i];
      if (is_written(arguments.schema[i])) {
        continue;
      }
      if (value.isTensor() && is_saved(value.toTensor())) {
        value = at::alias(value.toTensor());
      } else if (value.isTensorList()) {
        auto tensors = value.toTensorVector();
        for (auto& tensor : tensors) {
          tensor = is_saved(tensor) ? at::alias(tensor) : tensor;
        }
        value = c10::List<at::Tensor>(tensors);
      }
    }
  }

 private:
  /// Returns true if the operator would spread the shard over a larger tensor.
  static bool grows(const OpArguments& arguments, const at::Tensor& shard) {
    bool result = false;
    for_each_tensor(arguments, [&](const at::Tensor& other, const c10::Argument&) {
      result |= other.defined() && !at::is_expandable_to(other.sizes(), shard.sizes());
    });
    return result;
  }

  static bool writes(const OpArguments& arguments) {
    return std::any_of(arguments.schema.begin(), arguments.schema.end(), is_written);
  }

  static GuardedShards* group_of(const at::Tensor& tensor) {
    const auto found = groups.find(tensor.storage().unsafeGetStorageImpl());
    return found == groups.end() ? nullptr : found->second;
  }

  [[noreturn]] static void refuse(const c10::OperatorHandle& op, const at::Tensor& tensor) {
    std::string name = "of a module that is gone";
    std::string way_out;
    {
      const std::lock_guard lock(groups_mutex);
      if (const auto* group = group_of(tensor)) {
        const auto item = static_cast<int64_t>(tensor.element_size());
        const auto& param = group->param_at_(tensor.storage_offset() * item);
        name = "'" + param.name() + "'";
        way_out = param.user().way_out();
      }
    }
    TORCH_CHECK(
        false, "[fully_shard] ", op.operator_name().name, " was given parameter ", name,
        " while it is sharded, of sizes ", tensor.sizes(),
        ": its module was called around the hooks, or outside of the forward of the module that "
        "was given to fully_shard. ",
        way_out);
  }
};

GuardedShards::GuardedShards(const at::Tensor& shard, ParamAt param_at)
    : storage_(shard.storage()), param_at_(std::move(param_at)) {
  const std::lock_guard lock(groups_mutex);
  groups.emplace(storage_.unsafeGetStorageImpl(), this);
}

GuardedShards::~GuardedShards() {
  const std::lock_guard lock(groups_mutex);
  groups.erase(storage_.unsafeGetStorageImpl());
}

at::Tensor guarded(const at::Tensor& shard) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(shard.storage()), shard.key_set().add(kShardKey),
      shard.dtype());
  impl->set_sizes_and_strides(shard.sizes(), shard.strides(), shard.storage_offset());
  return at::Tensor(std::move(impl));
}

void enter_forward() {
  ++num_forwards;
}

void leave_forward() {
  --num_forwards;
}

} // namespace fsdp::detail

namespace {

void guard_shards(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  using namespace fsdp::detail;
  const UnguardedShards unguarded;
  const OpArguments arguments(op, *stack);
  ShardGuard::check(op, arguments);
  ShardGuard::give_views(arguments);
  op.callBoxed(stack);
}

} // namespace

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&guard_shards>());
}
