#pragma once

#include <cstdint>
#include <memory>

#include <fsdp/export.h>

namespace fsdp {

/// How much memory of a device the shards of a model may take, with their gradients and the states
/// of their optimizer. Copies share what is left, and each rank has a budget of its own.
class FSDP_API DeviceBudget {
 public:
  /// `states` is how many states of a parameter's size the optimizer keeps: two for AdamW.
  // NOLINTNEXTLINE(google-explicit-constructor): a number of bytes is enough
  DeviceBudget(int64_t bytes, int states = 2);

  /// Takes these bytes. Returns false, and takes nothing, if fewer are left.
  bool take(int64_t bytes) const;
  /// The bytes that are left to the calling rank.
  int64_t left() const;
  int states() const;

 private:
  struct Ledger;
  std::shared_ptr<Ledger> ledger_;
};

} // namespace fsdp
