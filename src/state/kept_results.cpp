#include "state/kept_results.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace fsdp::detail {

namespace {

/// Returns the index of the argument that is the probability of dropout, if the operator has one.
std::optional<size_t> dropout_argument(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "dropout_p") {
      return i;
    }
  }
  return std::nullopt;
}

/// Whether autograd records an operator with these arguments.
bool is_recorded(c10::ArrayRef<c10::IValue> arguments) {
  bool recorded = false;
  for_each_tensor(arguments, [&](const at::Tensor& each) { recorded |= each.requires_grad(); });
  return recorded && at::GradMode::is_enabled();
}

/// Whether the results can be watched: they are numbers, and tensors with memory of their own. A
/// result that shares memory with an argument need not be kept, as it is quick to make again.
bool can_watch(const RanOperator& ran) {
  bool can = true;
  for (const auto& value : ran.results) {
    can &= value.isTensor() || value.isTensorList() || value.isNone() || value.isScalar();
  }
  for_each_tensor(ran.results, [&](const at::Tensor& result) {
    can &= result.has_storage();
    for_each_tensor(ran.arguments, [&](const at::Tensor& argument) {
      can = can && !(argument.has_storage() && argument.is_alias_of(result));
    });
  });
  return can;
}

/// Another tensor with the same data that shares its version, and is not part of a graph.
at::Tensor alias_of(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  auto* const impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(
      impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

c10::IValue alias_of(const c10::IValue& value) {
  if (value.isTensor()) {
    return alias_of(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& each : value.toTensorVector()) {
      tensors.push_back(alias_of(each));
    }
    return tensors;
  }
  return value;
}

std::vector<c10::IValue> aliases_of(c10::ArrayRef<c10::IValue> values) {
  std::vector<c10::IValue> aliases;
  for (const auto& value : values) {
    aliases.push_back(alias_of(value));
  }
  return aliases;
}

/// True while a kernel runs. Operators that the kernel calls do not count.
thread_local bool in_kernel = false;

} // namespace

bool can_keep_results(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto aliases = [](const c10::Argument& each) { return each.alias_info() != nullptr; };
  return !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::BackendSelect) &&
         std::none_of(schema.arguments().begin(), schema.arguments().end(), aliases) &&
         std::none_of(schema.returns().begin(), schema.returns().end(), aliases) &&
         (!op.hasTag(at::Tag::nondeterministic_seeded) || dropout_argument(op)) &&
         !op.operator_name().name.starts_with("c10d::"); // its schemas do not say what it writes to
}

bool KeptResults::Entry::can_be_used() const {
  return !results.empty() && std::all_of(watched.begin(), watched.end(), [](const Watched& each) {
    return each.tensor._version() == each.version;
  });
}

/// Sees every operator that does not consist of others.
class KeptResults::Interceptor : public OpInterceptor {
 public:
  explicit Interceptor(KeptResults& kept) : kept_(kept) {}
  bool enters_operators() const override {
    return true;
  }
  bool replaces(const c10::OperatorHandle& op, const torch::jit::Stack&) override {
    const auto& excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
    return !in_kernel && !excluded.has(c10::DispatchKey::AutogradOther) &&
           !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  }

 protected:
  /// Whether this call counts: autograd records it, and its results could be kept.
  static bool counts(const OpKernel& kernel, const torch::jit::Stack& stack) {
    const auto arguments = torch::jit::last(stack, kernel.op.schema().arguments().size());
    if (!can_keep_results(kernel.op) || !is_recorded(arguments)) {
      return false;
    }
    const auto dropout = dropout_argument(kernel.op);
    return !dropout || arguments[*dropout].toDouble() == 0;
  }

  /// Runs the kernel, and calls `see` with what has run.
  template <class See>
  static void run(const OpKernel& kernel, size_t index, torch::jit::Stack& stack, const See& see) {
    const auto& schema = kernel.op.schema();
    const auto arguments = torch::jit::last(stack, schema.arguments().size()).vec();
    run_kernel(kernel, stack);
    const auto results = torch::jit::last(stack, schema.returns().size());
    see(RanOperator{kernel.op.operator_name().name, index, arguments, results});
  }

  static void run_kernel(const OpKernel& kernel, torch::jit::Stack& stack) {
    struct Leave {
      ~Leave() {
        in_kernel = false;
      }
    } const leave;
    in_kernel = true;
    kernel.run(stack);
  }

  KeptResults& kept_;
};

class KeptResults::Keep : public Interceptor {
 public:
  using Interceptor::Interceptor;
  ~Keep() override {
    for (auto& [_, entries] : kept_.entries_) {
      for (auto& entry : entries) {
        if (!entry.can_be_used()) {
          kept_.release(entry);
        }
      }
    }
    kept_.by_memory_.clear();
  }

  void instead(const OpKernel& kernel, torch::jit::Stack& stack) override {
    if (!counts(kernel, stack)) {
      run_kernel(kernel, stack);
      watch(torch::jit::last(stack, kernel.op.schema().returns().size()));
      return;
    }
    auto& entries = kept_.entries_[kernel.op.operator_name()];
    auto& entry = entries.emplace_back();
    run(kernel, entries.size() - 1, stack, [&](const RanOperator& ran) {
      watch(ran.results);
      if (can_watch(ran) && kept_.policy_->save(ran)) {
        entry = {aliases_of(ran.results), {}, ran.bytes()};
        for_each_tensor(entry.results, [&](const at::Tensor& each) {
          kept_.by_memory_[each.storage().unsafeGetStorageImpl()] = &entry;
          entry.watched.push_back({each, static_cast<uint32_t>(each._version())});
        });
      }
    });
  }

 private:
  /// Watches results that share the memory of an entry.
  void watch(c10::ArrayRef<c10::IValue> results) {
    for_each_tensor(results, [&](const at::Tensor& each) {
      if (!each.has_storage() || each.is_inference()) {
        return;
      }
      const auto found = kept_.by_memory_.find(each.storage().unsafeGetStorageImpl());
      if (found != kept_.by_memory_.end()) {
        found->second->watched.push_back({alias_of(each), static_cast<uint32_t>(each._version())});
      }
    });
  }
};

class KeptResults::Reuse : public Interceptor {
 public:
  Reuse(KeptResults& kept, bool once_more) : Interceptor(kept), once_more_(once_more) {}

  void instead(const OpKernel& kernel, torch::jit::Stack& stack) override {
    if (!counts(kernel, stack)) {
      run_kernel(kernel, stack);
      return;
    }
    const auto& name = kernel.op.operator_name();
    const auto index = num_calls_[name]++;
    auto& entries = kept_.entries_[name];
    auto* const entry = index < entries.size() ? &entries[index] : nullptr;
    if (entry && entry->can_be_used()) {
      torch::jit::drop(stack, kernel.op.schema().arguments().size());
      const auto results = aliases_of(entry->results);
      stack.insert(stack.end(), results.begin(), results.end());
    } else {
      run(kernel, index, stack, [&](const RanOperator& ran) { kept_.policy_->recomputed(ran); });
    }
    if (entry && !once_more_) {
      kept_.release(*entry);
    }
  }

 private:
  const bool once_more_;
  std::unordered_map<c10::OperatorName, size_t> num_calls_;
};

KeptResults::~KeptResults() {
  for (auto& [_, entries] : entries_) {
    for (auto& entry : entries) {
      release(entry);
    }
  }
}

void KeptResults::release(Entry& entry) {
  if (!entry.results.empty()) {
    policy_->released(entry.bytes);
    entry = {};
  }
}

std::unique_ptr<OpInterceptor> KeptResults::keep() {
  return std::make_unique<Keep>(*this);
}

std::unique_ptr<OpInterceptor> KeptResults::reuse(bool once_more) {
  return std::make_unique<Reuse>(*this, once_more);
}

} // namespace fsdp::detail
