#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "runtime/op_interceptor.h"

namespace fsdp::detail {

/// While this object lives, operators draw from generators of its own instead of torch's default
/// generators, which all threads share. Throws NotImplementedError if an operator that takes no
/// generator (fused dropout) draws on an accelerator.
class SeededDraws : public OpInterceptor {
 public:
  using Seed = std::shared_ptr<std::optional<uint64_t>>;

  explicit SeededDraws(uint64_t seed) : SeededDraws(std::make_shared<Seed::element_type>(seed)) {}
  /// If `*seed` is empty, it is set when the first generator is needed. The number comes from the
  /// enclosing SeededDraws, so that it repeats together with that one, or else from torch's default
  /// generator.
  explicit SeededDraws(Seed seed) : seed_(std::move(seed)) {}

  /// Many operators draw through another operator: randn calls normal_, for example.
  bool enters_operators() const override {
    return true;
  }
  void before(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;

 private:
  const at::Generator& generator(c10::Device device);
  uint64_t draw_outside() const;

  const Seed seed_;
  std::unordered_map<c10::Device, at::Generator> generators_;
};

} // namespace fsdp::detail
