#include <fsdp/process_group.h>

#include <ATen/ATen.h>

#include <exception>
#include <functional>
#include <mutex>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "process_group/agreement.h"
#include "process_group/c10d_adapter.h"
#include "process_group/group_state.h"
#include "process_group/observer.h"
#include "process_group/reduction.h"
#include "runtime/stream.h"

namespace fsdp {

namespace detail {

struct WorkState {
  std::mutex mutex;                    // several threads may wait for copies of a Work
  c10::intrusive_ptr<c10d::Work> work; // null when there is nothing left to wait for
  bool has_streams = false;            // true: every wait must order its current stream
  std::function<void()> finish;        // completes the backend's result, or empty
  std::exception_ptr failure;
  std::shared_ptr<GroupState> group;
  CollectiveKind kind = CollectiveKind::Barrier;
  std::string module;    // the module that the collective belongs to, or ""
  uint64_t observed = 0; // the collective's id for observers
};

namespace {

/// Returns true if the exception that is being handled is about the connection, not about one call.
bool is_backend_error() {
  try {
    throw;
  } catch (const c10::DistBackendError&) {
    return true; // NCCL's, in a call after the one that failed
  } catch (...) {
    return false;
  }
}

/// Runs `step`, which calls the backend. A CommError gets the module's name added.
/// Any other exception becomes a CommError that names the operation and, with
/// `diagnose` or if the connection failed, the ranks that are gone.
template <class Step>
auto with_comm_errors(
    GroupState& group, CollectiveKind kind, const std::string& module, bool diagnose, Step step) {
  try {
    return step();
  } catch (CommError& error) {
    if (!module.empty()) {
      error.add_context("for module '" + module + "'");
    }
    throw;
  } catch (...) {
    const auto reason = current_exception_text();
    const auto factory = diagnose || is_backend_error() ? group.factory.lock() : nullptr;
    auto diagnosis = factory ? factory->diagnose() : std::string();
    if (!diagnosis.empty()) {
      diagnosis += "; ";
    }
    FSDP_THROW(
        CommError, to_string(kind), module.empty() ? "" : " for module '" + module + "'",
        " in group '", group.name, "' failed on rank ", group.world_ranks[group.backend->getRank()],
        " (", group.backend->getBackendName(), "): ", diagnosis, reason);
  }
}

/// Turns Avg and PremulSum into a Sum for a backend that lacks them. Returns a
/// function that completes the result after the Sum, or an empty one.
std::function<void()> emulate_scaling(CollectiveCall& call, int size) {
  const auto op = std::exchange(call.op, ReduceOp::Sum);
  call.asked_op = op;
  if (op.kind() == ReduceOp::Avg) {
    return [output = call.output, size] {
      at::NoGradGuard no_grad;
      divide_sum(output, size);
    };
  }
  if (call.kind == CollectiveKind::AllReduce) {
    at::NoGradGuard no_grad;
    call.output.mul_(op.factor());
  } else {
    call.input = call.input.detach().mul(op.factor()); // a copy: the caller's input must not change
  }
  return {};
}

} // namespace
} // namespace detail

Work::Work(std::shared_ptr<detail::WorkState> state) : state_(std::move(state)) {}

void Work::wait() {
  if (!state_) {
    return;
  }
  auto& state = *state_;
  std::lock_guard lock(state.mutex);
  if (state.failure) {
    std::rethrow_exception(state.failure);
  }
  if (!state.work) {
    return;
  }
  try {
    const detail::CollectiveWait waiting(state.observed);
    detail::with_comm_errors(
        *state.group, state.kind, state.module, /*diagnose=*/true, [&] { state.work->wait(); });
    if (const auto finish = std::exchange(state.finish, nullptr)) {
      finish();
    }
  } catch (...) {
    state.failure = std::current_exception();
    throw;
  }
  if (!state.has_streams) {
    state.work.reset(); // the backend's work may keep the tensors alive
  }
}

void Work::then(std::function<void()> finish) {
  if (!state_) {
    finish();
    return;
  }
  const std::lock_guard lock(state_->mutex);
  if (!state_->work) { // somebody has waited for it
    finish();
    return;
  }
  TORCH_CHECK(!state_->finish, "[Work] then() was called before on this collective");
  state_->finish = std::move(finish);
}

ProcessGroup::ProcessGroup(std::shared_ptr<detail::GroupState> state) : state_(std::move(state)) {}

ProcessGroup::ProcessGroup(const c10::intrusive_ptr<c10d::Backend>& backend, std::string name)
    : state_(std::make_shared<detail::GroupState>()) {
  TORCH_CHECK_VALUE(backend, "[ProcessGroup] the backend is null");
  state_->backend = backend;
  state_->name = std::move(name);
  state_->world_ranks.resize(backend->getSize());
  std::iota(state_->world_ranks.begin(), state_->world_ranks.end(), 0);
  state_->choose_comparison(/*is_ours=*/false);
}

int ProcessGroup::rank() const {
  return backend()->getRank();
}

int ProcessGroup::size() const {
  return backend()->getSize();
}

const std::vector<int>& ProcessGroup::ranks() const {
  (void)backend();
  return state_->world_ranks;
}

const std::string& ProcessGroup::name() const {
  (void)backend();
  return state_->name;
}

std::string ProcessGroup::backend_name() const {
  return backend()->getBackendName();
}

const c10::intrusive_ptr<c10d::Backend>& ProcessGroup::backend() const {
  TORCH_CHECK(state_, "this ProcessGroup is empty: it was default-constructed");
  return state_->backend;
}

Work ProcessGroup::issue(detail::CollectiveCall call) const {
  auto& backend = *this->backend();
  detail::check_call(call, backend.getRank(), backend.getSize());
  auto state = std::make_shared<detail::WorkState>();
  state->module = detail::CollectiveLabel::current();
  call.purpose = detail::CollectiveLabel::current_purpose();
  state->observed = detail::CollectiveObserver::notify(call, state_->name);
  const auto op = call.op.kind();
  state->work =
      detail::with_comm_errors(*state_, call.kind, state->module, /*diagnose=*/false, [&] {
        if ((op == ReduceOp::Avg || op == ReduceOp::PremulSum) &&
            !detail::scales_natively(backend)) {
          state->finish = detail::emulate_scaling(call, backend.getSize());
        }
        if (state_->history) {
          state_->history->add(call);
        }
        return state_->agreed_calls ? state_->agreed_calls->issue(call)
                                    : detail::issue(backend, call);
      });
  state->kind = call.kind;
  state->has_streams = call.output.defined() && detail::has_streams(call.output.device());
  state->group = state_;
  return Work(std::move(state));
}

Work ProcessGroup::all_gather_async(at::Tensor out, at::Tensor in) const {
  return issue(
      {.kind = detail::CollectiveKind::AllGather,
       .output = std::move(out),
       .input = std::move(in)});
}

Work ProcessGroup::reduce_scatter_async(at::Tensor out, at::Tensor in, ReduceOp op) const {
  return issue(
      {.kind = detail::CollectiveKind::ReduceScatter,
       .output = std::move(out),
       .input = std::move(in),
       .op = op});
}

Work ProcessGroup::all_reduce_async(at::Tensor tensor, ReduceOp op) const {
  return issue({.kind = detail::CollectiveKind::AllReduce, .output = std::move(tensor), .op = op});
}

Work ProcessGroup::broadcast_async(at::Tensor tensor, int root) const {
  return issue(
      {.kind = detail::CollectiveKind::Broadcast, .output = std::move(tensor), .root = root});
}

Work ProcessGroup::scatter_async(at::Tensor out, at::Tensor in, int root) const {
  TORCH_CHECK_VALUE(
      rank() != root || in.defined(), "[scatter] rank ", root, " is the root and brings no input");
  return issue(
      {.kind = detail::CollectiveKind::Scatter,
       .output = std::move(out),
       .input = rank() == root ? std::move(in) : at::Tensor(),
       .root = root});
}

Work ProcessGroup::all_to_all_async(
    at::Tensor out,
    at::Tensor in,
    std::vector<int64_t> out_splits,
    std::vector<int64_t> in_splits) const {
  return issue(
      {.kind = detail::CollectiveKind::AllToAll,
       .output = std::move(out),
       .input = std::move(in),
       .out_splits = std::move(out_splits),
       .in_splits = std::move(in_splits)});
}

Work ProcessGroup::barrier_async() const {
  return issue({.kind = detail::CollectiveKind::Barrier});
}

void ProcessGroup::all_gather(at::Tensor out, at::Tensor in) const {
  all_gather_async(std::move(out), std::move(in)).wait();
}

void ProcessGroup::reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op) const {
  reduce_scatter_async(std::move(out), std::move(in), op).wait();
}

void ProcessGroup::all_reduce(at::Tensor tensor, ReduceOp op) const {
  all_reduce_async(std::move(tensor), op).wait();
}

void ProcessGroup::broadcast(at::Tensor tensor, int root) const {
  broadcast_async(std::move(tensor), root).wait();
}

void ProcessGroup::scatter(at::Tensor out, at::Tensor in, int root) const {
  scatter_async(std::move(out), std::move(in), root).wait();
}

void ProcessGroup::all_to_all(
    at::Tensor out,
    at::Tensor in,
    std::vector<int64_t> out_splits,
    std::vector<int64_t> in_splits) const {
  all_to_all_async(std::move(out), std::move(in), std::move(out_splits), std::move(in_splits))
      .wait();
}

void ProcessGroup::barrier() const {
  barrier_async().wait();
}

at::Tensor ProcessGroup::allocate(int64_t numel, const at::TensorOptions& options) const {
  auto& backend = *this->backend();
  const auto device = options.device();
  return detail::has_streams(device) && backend.supportsTensorAlloc(device.index())
             ? backend.allocateTensor(numel, options)
             : at::empty({numel}, options);
}

std::shared_ptr<detail::BackendFactory> ProcessGroup::factory() const {
  (void)backend();
  auto factory = state_->factory.lock();
  TORCH_CHECK(
      factory, "[new_group] group '", state_->name,
      "' was built from a backend of your own, or its world was destroyed: it cannot be divided");
  return factory;
}

ProcessGroup ProcessGroup::new_group(const std::vector<int>& ranks, const std::string& tag) const {
  std::vector<int> world_ranks;
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(
        rank >= 0 && rank < size(), "[new_group] ", rank, " is not a rank of group '", name(),
        "', which has ", size());
    world_ranks.push_back(state_->world_ranks[rank]);
  }
  return ProcessGroup(factory()->group(world_ranks, tag));
}

ProcessGroup detail::group_of_world_ranks(
    const ProcessGroup& group, const std::vector<int>& world_ranks) {
  return ProcessGroup(group.factory()->group(world_ranks, ""));
}

} // namespace fsdp
