#include <fsdp/detail/recompute_scope.h>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <sstream>
#include <utility>

#include "process_group/rank_context.h"
#include "runtime/autocast_state.h"
#include "runtime/repeatable_draws.h"
#include "runtime/stream.h"
#include "state/kept_results.h"
#include "state/saved_tensor_hooks.h"

namespace fsdp::detail {

namespace {

using torch::autograd::get_current_graph_task_id;
using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

// Note [Recomputed calls]
//
// In a recomputed call every tensor that autograd saves goes through hooks that drop the tensor and
// keep a slot for it. When backward asks for the first of these tensors, the call is made again, in
// the middle of backward but without a backward of its own. The tensors that it saves fill the
// slots, in order. This is Python's non-reentrant form:
//
// - Hooks own their slot and share the frame. The frame holds slots weakly, and owns the arguments.
//   So all of it ends with the graph.
// - The arguments are saved as an operator saves them. Inside another recomputed call they are
//   dropped, too, and asking for them recomputes that call first. It is an error if an argument was
//   edited in place.
// - A recomputed tensor belongs to one backward, and leaves its slot when it is used.
//
// A policy may keep results of operators: see Note [Selective recomputation].

// ------------------------------------------------------------ The surroundings

/// The accelerators on which the call may draw random numbers: those of its arguments and the
/// current one, to which a root moves its inputs. Initializes no accelerator.
std::vector<c10::Device> accelerators(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  const auto add = [&](c10::Device device) {
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  };
  for (const auto& tensor : tensors) {
    if (tensor.defined() && has_streams(tensor.device())) {
      add(tensor.device());
    }
  }
  if (const auto type = accelerator_type()) {
    const auto device = current_device(*type);
    if (at::globalContext().getAcceleratorHooksInterface(type).hasPrimaryContext(device.index())) {
      add(device);
    }
  }
  return devices;
}

bool other_ranks_are_threads() {
  const auto context = current_context();
  return context && context->membership && context->world.size() > 1;
}

// ------------------------------------------------------------ What was saved

/// The slot of a tensor that was dropped.
struct Slot {
  at::Tensor tensor; // from recomputation until it is used
};

/// The properties that the repeated call's tensor must have, too.
struct TensorProperties {
  explicit TensorProperties(const at::Tensor& tensor)
      : dtype(tensor.scalar_type()), device(tensor.device()) {
    if (!tensor.is_nested()) {
      sizes = tensor.sizes().vec();
    }
    // Each call may write to a buffer, but not to a tensor with a gradient.
    if (tensor.requires_grad()) {
      version = tensor._version();
    }
  }
  bool operator==(const TensorProperties&) const = default;

  at::ScalarType dtype;
  c10::Device device;
  std::vector<int64_t> sizes;
  int64_t version = 0;
};

std::ostream& operator<<(std::ostream& out, const TensorProperties& properties) {
  return out << properties.dtype << at::IntArrayRef(properties.sizes) << " on "
             << properties.device;
}

// ------------------------------------------------------------ A recomputed call

class Frame : public HookSource, public std::enable_shared_from_this<Frame> {
 public:
  Frame(std::unique_ptr<RepeatableCall> call, const ActivationCheckpointOptions& options)
      : options_(options), call_(std::move(call)) {
    const auto tensors = call_->take_tensors();
    for (const auto& tensor : tensors) {
      arguments_.emplace_back(tensor, /*is_output=*/false);
    }
    if (options_.preserve_rng_state) {
      draws_.emplace(accelerators(tensors), other_ranks_are_threads());
    }
    if (options_.save) {
      kept_.emplace(options_.save);
    }
  }

  std::unique_ptr<SavedVariableHooks> make_hooks() override;
  std::unique_ptr<SeededDraws> first_draws() const {
    return draws_ ? draws_->first() : nullptr;
  }
  std::unique_ptr<OpInterceptor> keep_results() {
    return kept_ ? kept_->keep() : nullptr;
  }
  void set_complete() {
    complete_ = true;
  }

  std::shared_ptr<Slot> add(const at::Tensor& tensor) {
    auto slot = std::make_shared<Slot>();
    slots_.emplace_back(slot);
    properties_.emplace_back(tensor);
    return slot;
  }
  at::Tensor take(Slot& slot);

 private:
  friend class Recomputation;

  void recompute();
  void forget_recomputed();

  const ActivationCheckpointOptions options_;
  const std::unique_ptr<RepeatableCall> call_;
  std::vector<SavedVariable> arguments_;
  std::optional<RepeatableDraws> draws_;
  std::optional<KeptResults> kept_;
  const AutocastState autocast_ = AutocastState::current();
  bool complete_ = false; // false if backward runs inside of the call
  std::vector<std::weak_ptr<Slot>> slots_;
  std::vector<TensorProperties> properties_;
  std::mutex mutex_; // on an accelerator, backward may run in several threads
  int task_ = -1;    // the backward that the slots were filled for
};

/// Hook of the first call: drops the tensor and remembers its slot.
class Drop : public SavedVariableHooks {
 public:
  explicit Drop(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    slot_ = frame_->add(tensor);
  }
  at::Tensor call_unpack_hook() override {
    return frame_->take(*slot_);
  }

 private:
  const std::shared_ptr<Frame> frame_;
  std::shared_ptr<Slot> slot_;
};

std::unique_ptr<SavedVariableHooks> Frame::make_hooks() {
  return std::make_unique<Drop>(shared_from_this());
}

// ------------------------------------------------------------ Its recomputation

/// Thrown to end a recomputation early. Not a std::exception, because a forward may catch those.
struct Stop {};

class Recomputation;
thread_local const Recomputation* stopped = nullptr;
thread_local int unstoppable = 0;

class Recomputation : public HookSource {
 public:
  explicit Recomputation(Frame& frame)
      : frame_(frame),
        task_(get_current_graph_task_id()),
        outer_stopped_(std::exchange(stopped, nullptr)) {}
  ~Recomputation() override {
    stopped = outer_stopped_;
  }
  Recomputation(const Recomputation&) = delete;
  Recomputation& operator=(const Recomputation&) = delete;

  std::unique_ptr<SavedVariableHooks> make_hooks() override;
  bool was_stopped() const {
    return stopped == this;
  }

  /// Stores the tensor detached, so that it does not keep the recomputed graph alive.
  at::Tensor add(const at::Tensor& tensor) {
    const auto index = num_saved_++;
    auto data = tensor.requires_grad() ? tensor.detach() : tensor;
    if (index < frame_.slots_.size()) {
      compare(index, tensor);
      if (const auto slot = frame_.slots_[index].lock()) {
        slot->tensor = data;
      }
    }
    // Does not throw inside a backward that the call itself runs.
    if (frame_.options_.early_stop && num_saved_ >= frame_.slots_.size() && unstoppable == 0 &&
        get_current_graph_task_id() == task_) {
      stopped = this;
      throw Stop{};
    }
    return data;
  }

  /// The first difference from the first call. Empty if there is none.
  std::string difference() const {
    const auto expected = frame_.slots_.size();
    const bool may_be_more = frame_.options_.early_stop || !frame_.complete_;
    if (num_saved_ < expected || (num_saved_ > expected && !may_be_more)) {
      return c10::str("it saved ", num_saved_, " tensors, and ", expected, " in forward");
    }
    return difference_;
  }

 private:
  void compare(size_t index, const at::Tensor& tensor) {
    if (!frame_.options_.determinism_check || !difference_.empty()) {
      return;
    }
    const TensorProperties now(tensor);
    const auto& then = frame_.properties_[index];
    if (now.version != then.version) {
      difference_ = c10::str("saved tensor ", index, ", ", now, ", was written to since forward");
    } else if (now != then) {
      difference_ = c10::str("saved tensor ", index, " is ", now, ", and was ", then);
    }
  }

  Frame& frame_;
  const int task_;
  const Recomputation* const outer_stopped_;
  size_t num_saved_ = 0;
  std::string difference_;
};

/// Hook of the repeated call: fills the slot. Also keeps the tensor, because the call may run a
/// backward of its own.
class Keep : public SavedVariableHooks {
 public:
  explicit Keep(Recomputation& recomputation) : recomputation_(recomputation) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = recomputation_.add(tensor);
  }
  at::Tensor call_unpack_hook() override {
    return tensor_;
  }

 private:
  Recomputation& recomputation_;
  at::Tensor tensor_;
};

std::unique_ptr<SavedVariableHooks> Recomputation::make_hooks() {
  return std::make_unique<Keep>(*this);
}

at::Tensor Frame::take(Slot& slot) {
  const auto self = shared_from_this();
  std::lock_guard lock(mutex_);
  const auto task = get_current_graph_task_id();
  if (task == -1 || task != task_ || !slot.tensor.defined()) {
    recompute();
    task_ = task;
  }
  return std::exchange(slot.tensor, {});
}

void Frame::recompute() {
  std::vector<at::Tensor> tensors;
  for (const auto& argument : arguments_) {
    tensors.push_back(argument.unpack());
  }
  Recomputation recomputation(*this);
  try {
    const SavingThrough saving(recomputation);
    const at::AutoGradMode grad_mode(true);
    const AutocastGuard autocast(autocast_);
    std::optional<RepeatableDraws::RepeatGuard> draws;
    if (draws_) {
      draws.emplace(*draws_);
    }
    const auto reuse =
        kept_ ? kept_->reuse(torch::autograd::get_current_graph_task_keep_graph()) : nullptr;
    call_->run(std::move(tensors));
  } catch (c10::Error& error) {
    if (!recomputation.was_stopped()) {
      forget_recomputed();
      error.add_context(c10::str("when backward recomputed ", call_->name()));
      throw;
    }
  } catch (...) {
    if (!recomputation.was_stopped()) {
      forget_recomputed();
      throw;
    }
  }
  if (const auto difference = recomputation.difference(); !difference.empty()) {
    forget_recomputed();
    TORCH_CHECK(
        false, "[checkpoint] ", call_->name(),
        " was not the same when backward recomputed it: ", difference,
        ". It may depend on its arguments, on parameters and on what it draws from "
        "torch's default generators; not on what changes between the two calls");
  }
}

void Frame::forget_recomputed() {
  for (const auto& weak : slots_) {
    if (const auto slot = weak.lock()) {
      slot->tensor.reset();
    }
  }
}

} // namespace

// ------------------------------------------------------------ Public

struct RecomputeScope::State {
  explicit State(std::shared_ptr<Frame> frame)
      : frame(std::move(frame)),
        draws(this->frame->first_draws()),
        keep(this->frame->keep_results()),
        saving(*this->frame) {}
  ~State() {
    frame->set_complete();
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  const std::shared_ptr<Frame> frame;
  const std::unique_ptr<SeededDraws> draws;
  const std::unique_ptr<OpInterceptor> keep;
  const SavingThrough saving;
};

bool RecomputeScope::needed() {
  return at::GradMode::is_enabled();
}

RecomputeScope::RecomputeScope(
    std::unique_ptr<RepeatableCall> call, const ActivationCheckpointOptions& options)
    : state_(std::make_unique<State>(std::make_shared<Frame>(std::move(call), options))) {}

RecomputeScope::~RecomputeScope() = default;

bool RecomputeScope::stopping() {
  return stopped != nullptr;
}

NoEarlyStop::NoEarlyStop() {
  ++unstoppable;
}

NoEarlyStop::~NoEarlyStop() {
  --unstoppable;
}

} // namespace fsdp::detail
