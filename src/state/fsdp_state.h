#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "group/param_group.h"

namespace fsdp::detail {

class FSDPState;

/// Idle -> Forward -> Idle -> PreBackward (a gradient of an output arrives)
/// -> PostBackward (those of the inputs are done) -> Idle (end of backward).
enum class TrainingState : std::uint8_t { Idle, Forward, PreBackward, PostBackward };

/// What the states under one root share.
struct StateContext {
  std::vector<std::weak_ptr<FSDPState>> states; // in module order, the root first
  bool final_callback_queued = false;
  bool is_last_backward = true;
  std::vector<std::weak_ptr<FSDPState>> post_forward_order; // with multiplicity
};

/// One sharded module: when its group is gathered, freed and reduced. Knows
/// nothing of torch::nn: it is told when forward begins and ends, and learns
/// from autograd when backward does.
class FSDPState : public std::enable_shared_from_this<FSDPState> {
 public:
  /// States in and below this module, in module order, itself first.
  using FindStates = std::function<std::vector<std::shared_ptr<FSDPState>>()>;

  /// `group` is null for a module without parameters of its own.
  FSDPState(std::string name, std::unique_ptr<FSDPParamGroup> group, FindStates find_states);

  const std::string& name() const {
    return name_;
  }
  FSDPParamGroup* group() {
    return group_.get();
  }
  /// This state and those below it.
  std::vector<std::shared_ptr<FSDPState>> states_below() const {
    return find_states_();
  }

  // ---- Called around forward

  void pre_forward();
  void replace_inputs(const std::vector<at::Tensor*>& tensors);
  void post_forward(const std::vector<at::Tensor*>& outputs);
  void forward_failed();
  bool in_forward() const {
    return in_forward_;
  }

  // ---- Called by autograd

  void pre_backward();
  void post_backward();

  // ---- Called by the user

  void unshard();
  void reshard();
  /// Forgets an iteration that did not end: nothing is pending, all is sharded.
  void reset();

  // ---- Settings

  /// No value: automatic, which is true except at the root.
  std::optional<bool> reshard_after_forward;
  bool reduce_grads = true;
  void set_is_last_backward(bool last);

 private:
  void lazy_init();
  void queue_final_callback();
  void prefetch_before_backward();
  void check_outputs(const std::vector<at::Tensor*>& outputs) const;
  static void finish_backward(StateContext& context);
  static void reset_all(StateContext& context);

  const std::string name_;
  const std::unique_ptr<FSDPParamGroup> group_;
  const FindStates find_states_;
  std::shared_ptr<StateContext> context_; // from lazy init on
  TrainingState training_state_ = TrainingState::Idle;
  bool is_root_ = false;
  bool in_forward_ = false;
  std::vector<size_t> post_forward_indices_; // of this state in the order
};

} // namespace fsdp::detail
