#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace fsdp::detail {

/// Makes the hooks that a tensor goes through when autograd saves it.
class HookSource {
 public:
  virtual ~HookSource() = default;
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() = 0;
};

/// While this object lives, tensors that autograd saves in the calling thread go through the
/// source's hooks, and not through those of an outer SavingThrough.
class SavingThrough {
 public:
  explicit SavingThrough(HookSource& source);
  ~SavingThrough();
  SavingThrough(const SavingThrough&) = delete;
  SavingThrough& operator=(const SavingThrough&) = delete;

 private:
  HookSource* const outer_;
};

} // namespace fsdp::detail
