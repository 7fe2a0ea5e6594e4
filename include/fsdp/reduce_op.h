#pragma once

#include <string>

#include <fsdp/export.h>

namespace fsdp {

/// How a collective combines the values of the ranks. Every kind works on every backend: kinds
/// that a backend lacks are emulated.
class FSDP_API ReduceOp {
 public:
  enum Kind { Sum, Avg, Max, Min, Product, PremulSum };

  // NOLINTNEXTLINE(google-explicit-constructor): ReduceOp::Avg converts
  ReduceOp(Kind kind = Sum);

  /// Multiplies every rank's value by `factor`, then sums. For floating point and complex tensors
  /// only.
  static ReduceOp premul_sum(double factor);

  Kind kind() const {
    return kind_;
  }
  double factor() const {
    return factor_;
  }
  /// "sum", "avg", ...
  std::string str() const;

  bool operator==(const ReduceOp&) const = default;

 private:
  ReduceOp(Kind kind, double factor) : kind_(kind), factor_(factor) {}

  Kind kind_;
  double factor_ = 1.0;
};

} // namespace fsdp
