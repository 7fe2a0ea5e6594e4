#include <fsdp/step_in_backward.h>

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <fsdp/muon.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/check.h"
#include "param/param_placement.h"
#include "process_group/rank_context.h"
#include "runtime/object_in_use.h"

namespace fsdp::optim {

namespace {

using Params = std::vector<at::Tensor>;

void check_steps_on_some_parameters(const torch::optim::Optimizer& optimizer) {
  TORCH_CHECK_VALUE(
      !dynamic_cast<const Muon*>(&optimizer),
      "[StepInBackward] Muon exchanges the matrices of all groups in one step; call its step() "
      "after backward");
  TORCH_CHECK_VALUE(
      !dynamic_cast<const torch::optim::LBFGS*>(&optimizer),
      "[StepInBackward] LBFGS needs all gradients, several times; call its step() after backward");
}

/// Lets an optimizer step on some of its parameters. These keep their positions in the parameter
/// groups, which decide how LowPrecisionAdamW rounds them. A tensor without a gradient stands in
/// for each of the others.
class StepOnSome {
 public:
  explicit StepOnSome(torch::optim::Optimizer& optimizer)
      : optimizer_(optimizer), nothing_(at::empty({0})) {
    for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
      const auto& params = optimizer.param_groups()[group].params();
      for (size_t index = 0; index < params.size(); ++index) {
        positions_.emplace(params[index].unsafeGetTensorImpl(), std::pair(group, index));
      }
      params_.push_back(params);
      lists_.emplace_back(params.size(), nothing_);
    }
  }

  bool has(const at::Tensor& param) const {
    return positions_.contains(param.unsafeGetTensorImpl());
  }

  void operator()(const Params& params) {
    check_same_parameters();
    put(params, /*back=*/false);
    swap_lists();
    const auto after = c10::make_scope_exit([&] {
      swap_lists();
      put(params, /*back=*/true);
    });
    optimizer_.step();
  }

  void check_same_parameters() const {
    const auto& groups = optimizer_.param_groups();
    TORCH_CHECK_VALUE(
        std::equal(
            groups.begin(), groups.end(), params_.begin(), params_.end(),
            [](const auto& group, const auto& params) {
              return std::equal(
                  group.params().begin(), group.params().end(), params.begin(), params.end(),
                  [](const auto& one, const auto& two) { return one.is_same(two); });
            }),
        "[StepInBackward] the optimizer has other parameters than before; make a StepInBackward "
        "after its parameter groups are complete");
  }

 private:
  void put(const Params& params, bool back) {
    for (const auto& param : params) {
      const auto [group, index] = positions_.at(param.unsafeGetTensorImpl());
      lists_[group][index] = back ? nothing_ : param;
    }
  }

  void swap_lists() {
    for (size_t group = 0; group < lists_.size(); ++group) {
      optimizer_.param_groups()[group].params().swap(lists_[group]);
    }
  }

  torch::optim::Optimizer& optimizer_;
  const at::Tensor nothing_;
  std::unordered_map<const void*, std::pair<size_t, size_t>> positions_; // by parameter
  std::vector<Params> params_;                                           // of each parameter group
  std::vector<Params> lists_; // the same, with a stand-in for each that is not stepped on
};

/// Parameters whose gradients are complete.
class Complete {
 public:
  explicit Complete(Params params) : params_(std::move(params)) {
    remember_grads();
  }
  const Params& params() const {
    return params_;
  }
  void remember_grads() {
    grads_.clear();
    for (const auto& param : params_) {
      check(param.grad().defined(), param);
      grads_.emplace_back(param.grad(), param.grad()._version());
    }
  }
  /// Throws if a gradient was changed or cleared since remember_grads. The change would be lost or
  /// would need a second step, and a parameter without a gradient would get no step.
  void check_grads() const {
    for (size_t i = 0; i < params_.size(); ++i) {
      const auto& [grad, version] = grads_[i];
      check(params_[i].grad().is_same(grad) && grad._version() == version, params_[i]);
    }
  }

 private:
  static void check(bool is_unchanged, const at::Tensor& param) {
    TORCH_CHECK(
        is_unchanged, "[StepInBackward] the gradient of parameter '", detail::name_of(param),
        "' was changed or cleared between backward and finish(). Only before_update may change it, "
        "not an optimizer or clipping, and only the forward of its own module may use the "
        "parameter");
  }

  Params params_;
  std::vector<std::pair<at::Tensor, int64_t>> grads_; // with their versions
};

} // namespace

/// The thread that updates parameters, and the updates that it has still to make.
class StepInBackward::Updates {
 public:
  Updates(
      const torch::nn::Module& module,
      torch::optim::Optimizer& optimizer,
      const BeforeUpdate& before_update)
      : optimizer_(optimizer), step_on_(optimizer), before_update_(before_update) {
    const auto params = module.parameters();
    TORCH_CHECK_VALUE(
        std::any_of(
            params.begin(), params.end(), [&](const auto& param) { return step_on_.has(param); }),
        "[StepInBackward] the optimizer has no parameter of the module");
  }

  ~Updates() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  /// Called in backward. The thread updates the parameters that are in host memory. The others are
  /// left to `finish`.
  void add(ReducedGrads grads) {
    in_use_.push_back(grads.in_use);
    Params on_host, others;
    for (const auto& param : grads.params) {
      if (step_on_.has(param)) {
        (param.is_cpu() ? on_host : others).push_back(param);
      }
    }
    for (const auto& param : on_host) {
      if (!updated_.insert(param.unsafeGetTensorImpl()).second) {
        refuse(param);
      }
    }
    for_finish_.emplace_back(std::move(others));
    if (on_host.empty()) {
      return;
    }
    const std::lock_guard lock(mutex_);
    waiting_.push_back({Complete(std::move(on_host)), std::move(grads.wait)});
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { run(); });
    }
    changed_.notify_all();
  }

  void finish() {
    const auto updated = wait();
    const auto for_finish = std::exchange(for_finish_, {});
    if (auto error = std::exchange(error_, nullptr)) {
      optimizer_.zero_grad();
      std::rethrow_exception(error);
    }
    step_on_.check_same_parameters();
    for (const auto& complete : for_finish) {
      complete.check_grads();
    }
    Params left;
    for (const auto& group : optimizer_.param_groups()) {
      for (const auto& param : group.params()) {
        if (param.grad().defined()) {
          if (updated.contains(param.unsafeGetTensorImpl())) {
            refuse(param);
          }
          left.push_back(param);
        }
      }
    }
    if (!left.empty()) {
      call_before_update(left);
      optimizer_.step();
      optimizer_.zero_grad();
    }
  }

  void discard() {
    discards_ = true;
    wait();
    discards_ = false;
    for_finish_.clear();
    error_ = nullptr;
    optimizer_.zero_grad();
  }

  /// Called by the destructor. Warns if `finish` was not called after the last backward, or if an
  /// update failed.
  void warn_if_unfinished() {
    if (in_use_.empty()) {
      return;
    }
    wait();
    try {
      if (error_) {
        std::rethrow_exception(error_);
      }
      TORCH_WARN(
          "[StepInBackward] finish() was not called after the last backward; parameters that are "
          "not in host memory were not updated");
    } catch (...) {
      TORCH_WARN("[StepInBackward] an update failed: ", detail::current_exception_text());
    }
  }

 private:
  /// Waits for the thread. Returns the parameters that it has updated.
  std::unordered_set<const void*> wait() {
    TORCH_CHECK(
        thread_.get_id() != std::this_thread::get_id(),
        "[StepInBackward] before_update must not call finish() or discard(): they wait for it");
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_.empty(); });
    in_use_.clear();
    return std::exchange(updated_, {});
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ends_ || !waiting_.empty(); });
      if (waiting_.empty()) {
        return;
      }
      auto& next = waiting_.front(); // others may only be added behind it
      lock.unlock();
      update(next);
      lock.lock();
      waiting_.pop_front();
      changed_.notify_all();
    }
  }

  [[noreturn]] static void refuse(const at::Tensor& param) {
    TORCH_CHECK(
        false, "[StepInBackward] parameter '", detail::name_of(param),
        "' got another gradient after it was updated. Call finish() after each backward, and "
        "set_is_last_backward(false) before each backward but the last one of a step. If its "
        "weight is used outside of its own module, too, put both modules in one fully_shard, or "
        "step after backward");
  }

  struct Waiting {
    Complete complete;
    std::function<void()> wait;
  };

  /// After an error, the rest of the step is left out.
  void update(Waiting& next) {
    detail::set_thread_context(rank_.lock());
    const auto after = c10::make_scope_exit([] { detail::set_thread_context(nullptr); });
    try {
      next.wait();
      if (!error_ && !discards_) {
        next.complete.check_grads();
        call_before_update(next.complete.params());
        next.complete.remember_grads();
        step_on_(next.complete.params());
        next.complete.check_grads();
        for (const auto& param : next.complete.params()) {
          param.mutable_grad().reset();
        }
      }
    } catch (...) {
      error_ = std::current_exception();
    }
  }

  void call_before_update(const Params& params) const {
    if (before_update_) {
      at::NoGradGuard no_grad;
      before_update_(params);
    }
  }

  torch::optim::Optimizer& optimizer_;
  const std::shared_ptr<const void> optimizer_in_use_ = detail::mark_in_use(&optimizer_);
  StepOnSome step_on_;
  const BeforeUpdate before_update_;
  const std::weak_ptr<detail::RankContext> rank_ = detail::current_context();
  std::unordered_set<const void*> updated_;   // given to the thread since the last `wait`
  std::vector<std::shared_ptr<void>> in_use_; // held until the next `wait`
  std::vector<Complete> for_finish_;          // parameters that are not in host memory
  std::exception_ptr error_;                  // only the thread uses it while updates wait
  std::atomic<bool> discards_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Waiting> waiting_; // the thread may be updating the first one
  bool ends_ = false;
  std::thread thread_;
};

StepInBackward::StepInBackward(
    ModuleRef module, torch::optim::Optimizer& optimizer, const BeforeUpdate& before_update)
    : module_(FSDPModule::of(module)),
      updates_(std::make_shared<Updates>(*module, optimizer, before_update)) {
  check_steps_on_some_parameters(optimizer);
  module_.set_reduced_grads_hook(
      [updates = updates_](ReducedGrads grads) { updates->add(std::move(grads)); });
}

StepInBackward::~StepInBackward() {
  if (std::uncaught_exceptions() == 0) {
    updates_->warn_if_unfinished();
  }
  try {
    module_.set_reduced_grads_hook(nullptr);
  } catch (const std::exception&) { // the module is gone
  }
}

void StepInBackward::finish() {
  updates_->finish();
}

void StepInBackward::discard() {
  updates_->discard();
}

} // namespace fsdp::optim
