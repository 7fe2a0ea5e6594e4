#include "runtime/repeatable_draws.h"

#include <ATen/Context.h>

#include <mutex>

namespace fsdp::detail {

namespace {

at::Tensor state_of(at::Generator& generator) {
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator& generator, const at::Tensor& state) {
  std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

} // namespace

RepeatableDraws::RepeatableDraws(const std::vector<c10::Device>& devices, bool shared) {
  if (shared) {
    seed_ = std::make_shared<SeededDraws::Seed::element_type>();
    return;
  }
  const auto save = [this](c10::Device device) {
    auto generator = at::globalContext().defaultGenerator(device);
    auto state = state_of(generator);
    states_.emplace_back(std::move(generator), std::move(state));
  };
  save(c10::kCPU);
  for (const auto device : devices) {
    save(device);
  }
}

std::unique_ptr<SeededDraws> RepeatableDraws::first() const {
  return seed_ ? std::make_unique<SeededDraws>(seed_) : nullptr;
}

RepeatableDraws::RepeatGuard::RepeatGuard(const RepeatableDraws& draws) : own_(draws.first()) {
  for (auto [generator, state] : draws.states_) {
    before_.emplace_back(generator, state_of(generator));
    set_state(generator, state);
  }
}

RepeatableDraws::RepeatGuard::~RepeatGuard() {
  for (auto& [generator, state] : before_) {
    set_state(generator, state);
  }
}

} // namespace fsdp::detail
