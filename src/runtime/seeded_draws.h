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

/// While it lives, operators that would draw from torch's default generators,
/// which all threads share, draw from ones of our own. Throws for those of
/// accelerators that take no generator, where they draw.
class SeededDraws : public OpInterceptor {
 public:
  using Seed = std::shared_ptr<std::optional<uint64_t>>;

  explicit SeededDraws(uint64_t seed) : SeededDraws(std::make_shared<Seed::element_type>(seed)) {}
  /// Without a value, it is drawn when it is first needed: by the one outside of
  /// this, so that it repeats with that one, else from torch's generator.
  explicit SeededDraws(Seed seed) : seed_(std::move(seed)) {}

  /// Many draw by another one that they call: randn by normal_, for example.
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
