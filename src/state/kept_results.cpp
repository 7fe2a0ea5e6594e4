#include "state/kept_results.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace fsdp::detail {

namespace {

/// Returns true if the operator is called with a probability of dropout that is not 0, or if it
/// always draws random numbers.
bool draws(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) {
    return false;
  }
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "dropout_p") {
      return stack[stack.size() - arguments.size() + i].toDouble() > 0;
    }
  }
  return true;
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

std::vector<uint32_t> versions_of(c10::ArrayRef<c10::IValue> values) {
  std::vector<uint32_t> versions;
  const auto add = [&](const at::Tensor& tensor) {
    versions.push_back(tensor.defined() ? tensor._version() : 0);
  };
  for (const auto& value : values) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& each : value.toTensorVector()) {
        add(each);
      }
    }
  }
  return versions;
}

/// Runs the kernel, and calls `see` with what has run.
template <class See>
void run(const OpKernel& kernel, size_t index, torch::jit::Stack& stack, const See& see) {
  const auto& schema = kernel.op.schema();
  const auto arguments = torch::jit::last(stack, schema.arguments().size()).vec();
  kernel.run(stack);
  const auto results = torch::jit::last(stack, schema.returns().size());
  see(RanOperator{kernel.op.operator_name().name, index, arguments, results});
}

} // namespace

bool can_keep_results(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto aliases = [](const c10::Argument& each) { return each.alias_info() != nullptr; };
  return !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         std::none_of(schema.arguments().begin(), schema.arguments().end(), aliases) &&
         std::none_of(schema.returns().begin(), schema.returns().end(), aliases);
}

class KeptResults::Keep : public OpInterceptor {
 public:
  explicit Keep(KeptResults& kept) : kept_(kept) {}
  bool enters_operators() const override {
    return true;
  }
  bool replaces(const c10::OperatorHandle& op, const torch::jit::Stack& stack) override {
    return can_keep_results(op) && !draws(op, stack);
  }
  void instead(const OpKernel& kernel, torch::jit::Stack& stack) override {
    auto& entries = kept_.entries_[kernel.op.operator_name()];
    entries.emplace_back();
    run(kernel, entries.size() - 1, stack, [&](const RanOperator& ran) {
      if (kept_.policy_->save(ran)) {
        entries.back() = {aliases_of(ran.results), versions_of(ran.results), ran.bytes()};
      }
    });
  }

 private:
  KeptResults& kept_;
};

class KeptResults::Reuse : public OpInterceptor {
 public:
  Reuse(KeptResults& kept, bool once_more) : kept_(kept), once_more_(once_more) {}
  bool enters_operators() const override {
    return true;
  }
  bool replaces(const c10::OperatorHandle& op, const torch::jit::Stack& stack) override {
    return can_keep_results(op) && !draws(op, stack);
  }
  void instead(const OpKernel& kernel, torch::jit::Stack& stack) override {
    const auto& name = kernel.op.operator_name();
    const auto index = num_calls_[name]++;
    auto& entries = kept_.entries_[name];
    auto* const entry = index < entries.size() ? &entries[index] : nullptr;
    if (entry && !entry->results.empty() && versions_of(entry->results) == entry->versions) {
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
  KeptResults& kept_;
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
