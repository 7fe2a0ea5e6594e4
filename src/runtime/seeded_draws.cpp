#include "runtime/seeded_draws.h"

#include <ATen/Context.h>
#include <ATen/ops/randint.h>

#include <limits>
#include <mutex>
#include <string>

namespace fsdp::detail {

namespace {

/// Throws NotImplementedError if `op` is a fused dropout that draws on an accelerator, because it
/// takes no generator.
void check_does_not_draw(const c10::OperatorHandle& op, const OpArguments& arguments) {
  const auto& name = op.operator_name().name;
  if (name != "aten::native_dropout" && name.rfind("aten::_scaled_dot_product_", 0) != 0) {
    return;
  }
  bool draws = false;
  for (size_t i = 0; i < arguments.schema.size(); ++i) {
    const auto& each = arguments.schema[i].name();
    const auto& value = arguments.values[i];
    if (each == "p" || each == "dropout_p") {
      draws = value.isDouble() && value.toDouble() > 0;
    } else if (each == "train" && value.isBool() && !value.toBool()) {
      return;
    }
  }
  const auto device = arguments.device();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !draws || device.is_cpu() || device.is_meta(), "[checkpoint] ", name, " on ", device,
      " draws from a generator that all ranks of this process share, so recomputation would draw "
      "other numbers; run each rank as a process of its own, or without dropout");
}

} // namespace

void SeededDraws::before(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const OpArguments arguments(op, stack);
  for (size_t i = 0; i < arguments.schema.size(); ++i) {
    if (arguments.is_left_out(i, c10::TypeKind::GeneratorType) && !arguments.device().is_meta()) {
      arguments.values[i] = generator(arguments.device());
    }
  }
  check_does_not_draw(op, arguments);
}

const at::Generator& SeededDraws::generator(c10::Device device) {
  auto& generator = generators_[device];
  if (!generator.defined()) {
    if (!*seed_) {
      *seed_ = draw_outside();
    }
    auto default_generator = at::globalContext().defaultGenerator(device);
    std::lock_guard lock(default_generator.mutex());
    generator = default_generator.clone();
    generator.set_current_seed(**seed_);
  }
  return generator;
}

uint64_t SeededDraws::draw_outside() const {
  std::optional<at::Generator> from;
  for (auto* each = outer(); each && !from; each = each->outer()) {
    if (auto* seeded = dynamic_cast<SeededDraws*>(each)) {
      from = seeded->generator(c10::kCPU);
    }
  }
  const auto high = std::numeric_limits<int64_t>::max();
  return static_cast<uint64_t>(at::randint(high, {1}, from, at::kLong).item<int64_t>());
}

} // namespace fsdp::detail
