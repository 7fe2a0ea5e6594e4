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

/// Shared by the states under one root.
struct StateContext {
  std::vector<std::weak_ptr<FSDPState>> states; // in module order, the root first
  FSDPState* forward_root = nullptr;            // the outermost of the forwards that run
  std::vector<ProcessGroup> process_groups;     // that the groups communicate over
  c10::Device device = at::kCPU;                // of the root
  bool creates_graph = false;                   // of the backward that runs
  uint64_t num_forwards = 0;                    // outermost ones that have begun with gradients
  std::vector<NodePtr> graph_begin;             // of the forward that runs, if it is checked
  bool final_callback_queued = false;
  bool is_last_backward = true;
  BackwardKind backward_kind() const {
    return {.is_last = is_last_backward, .creates_graph = creates_graph};
  }
  std::optional<StreamEvent> post_optim_event; // for the next forward
};

/// The tree of modules at and below a state's module.
struct Subtree {
  struct Node {
    std::string name; // "" is the module itself
    const void* module;
    std::shared_ptr<FSDPState> state;
  };
  std::vector<Node> nodes; // the sharded modules, in order
  // Only if asked for. A shared tensor appears under each of its names.
  std::vector<std::pair<std::string, at::Tensor>> params;
  std::vector<std::pair<std::string, at::Tensor>> buffers;
};
using SubtreeFunction = std::function<Subtree(bool with_tensors)>;

/// The state of one call of fully_shard. Decides when its groups are gathered, freed and reduced.
/// It does not know torch::nn: a ForwardScope tells it when the forward of its modules begins and
/// ends, and autograd hooks tell it when their backward does.
///
/// Usually it has one module and one group. Several modules (known by their addresses) share the
/// groups, which are gathered for the first module that runs and freed after the last one. Without
/// parameters there is no group.
class FSDPState : public std::enable_shared_from_this<FSDPState> {
 public:
  using Groups = std::vector<std::shared_ptr<FSDPParamGroup>>;

  FSDPState(
      std::string name,
      std::vector<const void*> modules,
      c10::Device device,
      Groups groups,
      SubtreeFunction get_subtree);

  /// The module's name from the root, after lazy init. Before, its type.
  const std::string& name() const {
    return name_;
  }
  const Groups& groups() const {
    return groups_;
  }
  c10::Device device() const {
    return device_;
  }
  /// Throws if parameters are being updated, see ReducedGrads.
  void check_updated() const;

  const CommContext& comm() const {
    return *comm_;
  }
  /// The plan of the sharded modules of a tree, whose top is the root of the forward.
  static ShardingPlan plan_of(const Subtree& tree);
  /// This state and those below it, each once.
  std::vector<std::shared_ptr<FSDPState>> states_below() const;

  // ---- Called around the forward of one of the modules

  bool is_running(const void* module) const;
  /// True if this call begins a forward of the state. False if another of its modules has begun
  /// it, or if backward recomputes it.
  bool pre_forward(const void* module);
  /// `begins` is the result of pre_forward. May replace the tensors.
  void replace_inputs(const std::vector<at::Tensor*>& tensors, bool begins);
  void post_forward(const void* module, const std::vector<at::Tensor*>& outputs);
  void forward_failed(const void* module);

  // ---- Called by the user

  void unshard();
  void wait_for_unshard();
  void reshard();
  /// Forgets an iteration that did not end: drops all pending work and shards everything.
  void reset();
  /// Reduces the gradients that backwards without synchronization have left in this tree, and ends
  /// their iteration. For schedules that keep backward from doing it.
  void finish_backward();
  void set_is_last_backward(bool is_last) {
    context_->is_last_backward = is_last;
  }
  void set_post_optim_event(StreamEvent event) {
    context_->post_optim_event = std::move(event);
  }
  /// This tree uses the streams, buffers and order of `first`'s.
  void share_comm(const FSDPState& first);

  // ---- Settings

  /// Keep the parameters after forward if this turns out to be the root.
  bool auto_reshard_after_forward = true;
  /// Look into the graph of some forwards for tensors that took the place of parameters.
  bool checks_graph = true;
  MixedPrecisionPolicy precision;
  std::vector<at::Tensor> ignored_params;
  std::vector<std::weak_ptr<FSDPState>> forward_prefetch;
  std::vector<std::weak_ptr<FSDPState>> backward_prefetch;

 private:
  /// Called when the gradient of an output arrives.
  using BackwardHook = std::function<void()>;
  using BackwardHooks = std::vector<BackwardHook>;

  /// Goes on to the next state. Between forward and backward it must be Idle.
  void enter(TrainingState next);

  // Lazy init
  void lazy_init();
  static std::vector<std::shared_ptr<FSDPState>> states_in(const Subtree& below);
  static void set_names(const Subtree& below);
  static void check_shared_params(const Subtree& below);
  static void check_filled(const Subtree& below);
  static void warn_of_unmanaged_params(const Subtree& below);
  static void log_groups(const std::vector<std::shared_ptr<FSDPState>>& states);

  // Forward
  void begin_root_forward();
  void recompute_forward();
  BackwardHooks end_root_forward();
  bool is_graph_checked() const;
  void check_graph_of(const std::vector<at::Tensor*>& outputs, std::vector<NodePtr> begin) const;
  void end_partial_forward(const std::vector<at::Tensor*>& outputs);
  BackwardHook complete_forward();
  void end_forward(const void* module, const std::vector<at::Tensor*>& outputs);
  void check_outputs(const std::vector<at::Tensor*>& outputs) const;
  uint64_t shard_version() const;

  // Backward
  static bool is_of_backward(TrainingState state) {
    return state == TrainingState::PreBackward || state == TrainingState::PostBackward;
  }
  bool in_backward() const {
    return is_of_backward(training_state_);
  }
  void grad_arrived();
  BackwardHook backward_hook(bool partial);
  void pre_backward(ForwardRecord& record, uint64_t shard_version, bool partial);
  void prefetch_for_backward(const ForwardRecord& record);
  void post_backward();
  void queue_final_callback();
  void queue_partial_callback();
  static void finish_backward(StateContext& context, CommContext& comm);
  static void compare_calls_of(const StateContext& context, const CommContext& comm);
  static void finish_states(
      const std::vector<std::shared_ptr<FSDPState>>& states,
      StateContext& context,
      CommContext& comm);
  static void reset_all(StateContext& context, CommContext& comm, bool drop_grads);

  std::string name_;
  const std::vector<const void*> modules_;
  const c10::Device device_;
  const Groups groups_;
  const SubtreeFunction get_subtree_;
  bool initialized_ = false;
  std::shared_ptr<StateContext> context_ = std::make_shared<StateContext>();
  std::shared_ptr<CommContext> comm_ = std::make_shared<CommContext>();
  TrainingState training_state_ = TrainingState::Idle;
  std::vector<const void*> running_;        // inside their forward
  std::vector<const void*> yet_to_forward_; // only if there are several modules
};

} // namespace fsdp::detail
