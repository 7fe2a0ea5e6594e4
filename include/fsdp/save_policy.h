#pragma once

// Selective activation checkpointing: chooses results of operators that a recomputed call keeps, so
// that backward does not compute them again. See ActivationCheckpointOptions::save.

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/export.h>

namespace fsdp {

/// An operator that has just run in a recomputed call.
struct FSDP_API RanOperator {
  /// For example "aten::mm", without the overload.
  const std::string& name;
  /// How many calls of this operator came before this one in the recomputed call.
  size_t index = 0;
  c10::ArrayRef<c10::IValue> arguments;
  c10::ArrayRef<c10::IValue> results;

  /// The size of the results.
  int64_t bytes() const;
  /// How many multiplications and additions it took, if it is one of aten's products of matrices
  /// (mm, bmm, addmm, baddbmm and variants of these), an attention or a convolution. Else 0.
  double flops() const;
};

/// Decides which results are kept. One object may serve several modules of one rank.
///
/// It is asked about operators that autograd records, below autograd: about `aten::mm` and not
/// about `aten::linear`. It is not asked about operators that write to an argument, return a view,
/// draw random numbers or choose a device (casts do), nor about results that are not numbers and
/// dense tensors with memory of their own. These always run again. So does an operator whose result
/// was written to afterwards.
///
/// An operator of your own must say in its schema what it writes to, and have the tag
/// nondeterministic_seeded if it draws random numbers.
class FSDP_API SavePolicy {
 public:
  virtual ~SavePolicy() = default;
  /// Whether to keep the results until backward needs them. Asked once, in forward.
  virtual bool save(const RanOperator& ran) = 0;
  /// Called when kept results of this size have been freed.
  virtual void released(int64_t /*bytes*/) {}
  /// Called when backward has run an operator again.
  virtual void recomputed(const RanOperator& /*ran*/) {}
};

/// Keeps the results of the operators with these names ("aten::mm" stands for all its overloads).
/// Throws ValueError if there is no such operator, or if it consists of other operators, as
/// aten::linear does, or has no results that can be kept.
FSDP_API std::shared_ptr<SavePolicy> save_operators(std::vector<std::string> names);

/// Keeps the results of products of matrices, attentions and convolutions. The rest, which takes
/// most of the memory and little of the time, is computed again.
FSDP_API std::shared_ptr<SavePolicy> save_matmuls();

/// Keeps results of products of matrices, attentions and convolutions, never more than `bytes` at
/// a time. In the first step it keeps nothing and sees what backward computes again. From then on
/// it keeps those that save the most arithmetic per byte, by the sizes of the step before.
FSDP_API std::shared_ptr<SavePolicy> save_within(int64_t bytes);

} // namespace fsdp
