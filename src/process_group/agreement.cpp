#include "process_group/agreement.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <bit>
#include <cstring>
#include <exception>
#include <utility>

#include "base/check.h"
#include "base/hash.h"
#include "base/text.h"
#include "launch/launch_env.h"
#include "process_group/c10d_adapter.h"
#include "process_group/group_state.h"
#include "process_group/nccl/nccl_backend.h"

namespace fsdp::detail {

namespace {

constexpr size_t kRecent = 4096; // calls, of a few steps

/// Returns every rank's `mine`, a one-dimensional tensor of the same size on each. Waits for the
/// peers.
at::Tensor gather(const Members& members, const at::Tensor& mine) {
  auto all = at::empty({members.backend->getSize(), mine.numel()}, mine.options());
  issue(*members.backend, {.kind = CollectiveKind::AllGather, .output = all, .input = mine})
      ->wait();
  return all.cpu();
}

// Under MetaInit a tensor without a named device would be a meta tensor.
at::Tensor numbers(const std::vector<int64_t>& values, c10::Device device) {
  const auto on_host = at::tensor(values, at::device(at::kCPU).dtype(at::kLong));
  // From memory that is not pinned, the copy would wait for the GPU.
  return device.is_cpu() ? on_host : on_host.pin_memory().to(device, /*non_blocking=*/true);
}

bool all_rows_equal(const at::Tensor& all) {
  return all.equal(all[0].expand_as(all));
}

/// Hides the thread's debug info, which has the profiler. A Work of gloo holds the profiler of its
/// caller, and torch crashes if the Work is dropped after the profiler has ended.
class Unprofiled {
 public:
  Unprofiled() {
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
  }
  ~Unprofiled() {
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(before_);
  }
  Unprofiled(const Unprofiled&) = delete;
  Unprofiled& operator=(const Unprofiled&) = delete;

 private:
  const std::shared_ptr<c10::ThreadLocalDebugInfo> before_ = c10::ThreadLocalDebugInfo::current();
};

/// Returns "rank 0: TEXT; rank 1: TEXT". Waits for the peers.
std::string texts_of_all(const Members& members, const std::string& mine, c10::Device device) {
  const auto lengths = gather(members, numbers({static_cast<int64_t>(mine.size())}, device));
  auto padded = at::zeros({lengths.max().item<int64_t>()}, at::device(at::kCPU).dtype(at::kByte));
  std::memcpy(padded.data_ptr(), mine.data(), mine.size());
  const auto all = gather(members, padded.to(device));
  std::vector<std::string> lines;
  for (int64_t i = 0; i < all.size(0); ++i) {
    const auto* text = static_cast<const char*>(all[i].const_data_ptr());
    lines.push_back(c10::str(
        "rank ", members.world_ranks[i], ": ",
        std::string(text, static_cast<size_t>(lengths[i].item<int64_t>()))));
  }
  return join(lines, "; ");
}

} // namespace

bool checks_collectives() {
  static const bool answer = [] {
    const auto asked = process_env("FSDP_CHECK_COLLECTIVES").value_or("all");
    FSDP_CHECK_AS(
        ConfigError, asked == "all" || asked == "none", "FSDP_CHECK_COLLECTIVES is '", asked,
        "', not one of all, none");
    return asked != "none";
  }();
  return answer;
}

uint64_t fingerprint(const CollectiveCall& call) {
  const bool has_output = call.output.defined();
  const bool split = !call.out_splits.empty() || !call.in_splits.empty();
  auto hash = add_to_hash(kEmptyHash, static_cast<uint64_t>(call.kind));
  hash = add_to_hash(hash, has_output ? static_cast<uint64_t>(call.output.scalar_type()) : 0);
  hash = add_to_hash(hash, has_output && !split ? call.output.numel() : 0);
  const auto op = call.asked_op.value_or(call.op);
  hash = add_to_hash(hash, static_cast<uint64_t>(op.kind()));
  hash = add_to_hash(hash, std::bit_cast<uint64_t>(op.factor()));
  hash = add_to_hash(hash, call.root);
  return add_to_hash(hash, call.purpose_hash());
}

// ------------------------------------------------------------ AgreedCalls

/// The caller's Work. It passes on to the backend's Work as soon as there is one.
class AgreedCalls::Passed : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return work_ || failure_; });
    if (failure_) {
      std::rethrow_exception(failure_);
    }
    lock.unlock();
    return work_->wait(timeout);
  }
  void pass(c10::intrusive_ptr<c10d::Work> work, std::exception_ptr failure) {
    const std::lock_guard lock(mutex_);
    work_ = std::move(work);
    failure_ = std::move(failure);
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  c10::intrusive_ptr<c10d::Work> work_;
  std::exception_ptr failure_;
};

AgreedCalls::AgreedCalls(Members members)
    : members_(std::move(members)), thread_([this] { run(); }) {}

AgreedCalls::~AgreedCalls() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

c10::intrusive_ptr<c10d::Work> AgreedCalls::issue(CollectiveCall call) {
  if (call.output.defined() && !call.output.is_cpu()) { // its stream is this thread's
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return requests_.empty() && !is_busy_; });
    check(call);
    return detail::issue(*members_.backend, call);
  }
  auto work = c10::make_intrusive<Passed>();
  {
    const std::lock_guard lock(mutex_);
    requests_.push_back({std::move(call), work, c10::InferenceMode::is_enabled()});
  }
  changed_.notify_all();
  return work;
}

void AgreedCalls::run() {
  const at::NoGradGuard no_grad;
  for (;;) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ends_ || !requests_.empty(); });
    if (requests_.empty()) {
      return;
    }
    auto request = std::move(requests_.front());
    requests_.pop_front();
    is_busy_ = true;
    lock.unlock();
    try {
      const c10::InferenceMode mode(request.in_inference_mode); // its tensors may be of that mode
      check(request.call);
      request.work->pass(detail::issue(*members_.backend, request.call), nullptr);
    } catch (...) {
      request.work->pass(nullptr, std::current_exception());
    }
    lock.lock();
    is_busy_ = false;
    changed_.notify_all();
  }
}

void AgreedCalls::check(const CollectiveCall& call) {
  const auto mine = static_cast<int64_t>(fingerprint(call));
  if (all_rows_equal(gather(members_, numbers({mine}, at::kCPU)))) {
    return;
  }
  FSDP_THROW(
      CommError, "in group '", members_.group,
      "' the ranks brought different calls: ", texts_of_all(members_, call.str(), at::kCPU),
      ". If they look alike, the names or sizes of the module's parameters differ");
}

// ------------------------------------------------------------ CallHistory

void CallHistory::add(const CollectiveCall& call) {
  const auto print = fingerprint(call);
  const std::lock_guard lock(mutex_);
  hash_ = add_to_hash(hash_, print);
  ++num_calls_;
  recent_.push_back({print, call.kind, call.purpose, call.purpose ? "" : call.str()});
  if (recent_.size() > kRecent) {
    recent_.pop_front();
  }
}

bool can_compare_calls(c10::Device device) {
  return !(device.is_cuda() && captures_graph());
}

void compare_calls(const std::vector<ProcessGroup>& groups, c10::Device device) {
  for (const auto& group : groups) {
    if (const auto& history = group.state_->history) {
      history->compare(device);
    }
  }
}

void CallHistory::compare(c10::Device device) {
  const std::lock_guard lock(mutex_);
  if (num_calls_ == num_compared_) {
    return;
  }
  num_compared_ = num_calls_;
  // The host may be a step ahead of a GPU. One of two comparisons under way has long ended.
  const size_t most = has_streams(device) ? 2 : 1;
  if (comparisons_.size() >= most) {
    auto oldest = std::move(comparisons_.front());
    comparisons_.pop_front();
    finish(oldest);
  }
  const Unprofiled unprofiled; // the Work stays until the next step
  Comparison next{.num_calls = num_calls_, .mine = {}, .all = {}, .work = {}, .ready = {}};
  next.mine = numbers({static_cast<int64_t>(hash_)}, device);
  auto all = at::empty({members_.backend->getSize(), 1}, next.mine.options());
  next.work = issue(
      *members_.backend, {.kind = CollectiveKind::AllGather, .output = all, .input = next.mine});
  if (has_streams(device)) {
    next.work->wait(); // the stream waits, and not the host
    next.all = at::empty(all.sizes(), all.options().device(at::kCPU).pinned_memory(true));
    next.all.copy_(all, /*non_blocking=*/true);
    next.ready = StreamEvent::of(optional_current_stream(device));
    next.work.reset();
  } else {
    next.all = all;
  }
  comparisons_.push_back(std::move(next));
}

void CallHistory::finish(Comparison& comparison) {
  if (comparison.work) {
    comparison.work->wait();
  }
  comparison.ready.synchronize();
  if (!all_rows_equal(comparison.all)) {
    comparisons_.clear();
    explain(comparison.mine.device());
  }
  const auto since = num_calls_ - comparison.num_calls;
  while (recent_.size() > since) {
    recent_.pop_front();
  }
}

/// Throws a CommError that says which calls differ. All ranks call this, because all have seen the
/// same hashes.
void CallHistory::explain(c10::Device device) {
  const auto counts = gather(members_, numbers({static_cast<int64_t>(recent_.size())}, device));
  const auto count = counts.min().item<int64_t>();
  std::vector<int64_t> prints;
  for (auto entry = recent_.end() - count; entry != recent_.end(); ++entry) {
    prints.push_back(static_cast<int64_t>(entry->fingerprint));
  }
  std::string mine = "nothing else";
  if (count > 0) {
    const auto all = gather(members_, numbers(prints, device));
    int64_t first = 0;
    while (first < count && all_rows_equal(all.select(1, first).unsqueeze(1))) {
      ++first;
    }
    if (first < count) {
      const auto& entry = *(recent_.end() - count + first);
      mine = entry.purpose ? c10::str(to_string(entry.kind), " ", entry.purpose->text) : entry.text;
    }
  }
  const auto texts = texts_of_all(members_, mine, device);
  recent_.clear();
  hash_ = 0; // begin anew
  FSDP_THROW(
      CommError, "in group '", members_.group,
      "' the ranks brought different calls in an earlier step, whose results are wrong: ", texts);
}

} // namespace fsdp::detail
