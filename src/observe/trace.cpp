#include <fsdp/distributed.h>
#include <fsdp/trace.h>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/files.h"
#include "observe/trace_events.h"
#include "process_group/exchange.h"
#include "process_group/observer.h"

namespace fsdp {

using detail::Activity;
using Clock = std::chrono::steady_clock;

namespace {

constexpr int64_t kShort = 1000; // ns; shorter spans get no event

int64_t to_ns(Clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

/// The two parts of "FSDP::pre_forward (layers.0)". The first one is empty if the range is not
/// ours.
struct RangeName {
  explicit RangeName(std::string_view name) {
    constexpr std::string_view ours = "FSDP::";
    if (!name.starts_with(ours)) {
      return;
    }
    what = name.substr(ours.size());
    if (const auto at = what.find(" ("); at != what.npos) {
      module = what.substr(at + 2);
      module = module.substr(0, module.rfind(')'));
      what = what.substr(0, at);
    }
  }

  Activity activity() const {
    if (what.empty()) {
      return Activity::User;
    }
    const bool updates = what == "optimizer_step" || what == "clip_grad_norm";
    return updates ? Activity::Optimizer : Activity::Sharding;
  }

  std::string_view what;
  std::string_view module;
};

} // namespace

// Note [What a rank is doing]
//
// A thread does one thing at a time. `open_` is a stack of open ranges, and of modules whose
// forward or backward runs. A forward begins when the range pre_forward ends, and ends when
// post_forward begins; backward likewise. The top of the stack is the thread's activity, except
// while it waits for a collective. So slices and waits fill the time without overlap.
struct Trace::Recorder : detail::CollectiveObserver {
  explicit Recorder(const TraceOptions& options) : options_(options) {
    TORCH_CHECK(!mine, "[Trace] this thread has a Trace already");
    sample_memory(); // the first call takes its time
    mine = this;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&range_begins, &range_ends)
                                             .scopes({at::RecordScope::USER_SCOPE}));
  }
  ~Recorder() override {
    stop();
  }

  void begin_step(int64_t step) {
    if (recording_) {
      cut();
      end_step();
      events_.steps.push_back({step, cut_at_, -1});
      sample_memory();
    }
  }

  void stop() {
    if (recording_) {
      cut();
      end_step();
      sample_memory();
      recording_ = false;
      at::removeCallback(handle_);
      mine = nullptr;
    }
  }

  const detail::TraceEvents& events() const {
    return events_;
  }
  int64_t waited() const {
    return waited_;
  }
  /// Nanoseconds since 1970. Steady clocks of two machines cannot be compared.
  int64_t began() const {
    return began_;
  }

 private:
  struct Open {
    Activity activity = Activity::Other;
    bool is_range = false;
    std::string name;
  };

  // ---------------------------------------------------------- Ranges

  static std::unique_ptr<at::ObserverContext> range_begins(const at::RecordFunction& range) {
    // Ignores threads that inherited the callback, and asynchronous work, which ends in another
    // thread.
    if (mine && !range.isAsync()) {
      mine->on_range_begin(range.name());
    }
    return nullptr;
  }
  static void range_ends(const at::RecordFunction& range, at::ObserverContext*) {
    if (mine && !range.isAsync()) {
      mine->on_range_end(range.name());
    }
  }

  void on_range_begin(std::string_view text) {
    const RangeName name(text);
    if (num_ranges_ == 0) {
      sample_memory();
    }
    cut();
    if (name.what == "root_pre_forward") { // a forward that threw has left some open
      close_all(Activity::Forward);
    } else if (name.what == "post_forward") {
      close(Activity::Forward, name.module);
    } else if (name.what == "post_backward") {
      close(Activity::Backward, name.module);
    }
    ++num_ranges_;
    open_.push_back({name.activity(), true, std::string(name.what.empty() ? text : name.what)});
    if (!name.module.empty()) {
      open_.back().name.append(" ").append(name.module);
    }
  }

  void on_range_end(std::string_view text) {
    const auto last =
        std::find_if(open_.rbegin(), open_.rend(), [](const auto& open) { return open.is_range; });
    if (last == open_.rend()) {
      return; // it began before the trace
    }
    const RangeName name(text);
    cut();
    open_.erase(std::next(last).base());
    --num_ranges_;
    if (name.what == "pre_forward") {
      open_.push_back({Activity::Forward, false, std::string(name.module)});
    } else if (name.what == "pre_backward") {
      open_.push_back({Activity::Backward, false, std::string(name.module)});
    } else if (name.what == "root_post_backward_callback") {
      close_all(Activity::Backward);
    }
    if (num_ranges_ == 0) {
      sample_memory();
    }
  }

  void close(Activity activity, std::string_view module) {
    const auto last = std::find_if(open_.rbegin(), open_.rend(), [&](const auto& open) {
      return !open.is_range && open.activity == activity && open.name == module;
    });
    if (last != open_.rend()) {
      open_.erase(std::next(last).base());
    }
  }

  void close_all(Activity activity) {
    std::erase_if(
        open_, [&](const auto& open) { return !open.is_range && open.activity == activity; });
  }

  // ---------------------------------------------------------- Collectives

  void on_collective(const detail::ObservedCollective& started) override {
    if (recording_) {
      indices_.emplace(started.id, events_.collectives.size());
      events_.collectives.push_back(
          {.kind = started.call.kind,
           .group = started.group,
           .module = started.module,
           .bytes = started.call.bytes(),
           .begin = now()});
    }
  }

  void on_wait_begin(uint64_t /*id*/) override {
    if (recording_) {
      cut();
    }
  }

  void on_wait_end(uint64_t id) override {
    if (!recording_) {
      return;
    }
    const auto begin = std::exchange(cut_at_, now());
    const auto length = cut_at_ - begin;
    waited_ += length;
    const auto found = indices_.find(id);
    if (found == indices_.end()) {
      return; // started before the trace
    }
    auto& collective = events_.collectives[found->second];
    if (collective.end < 0) { // a second wait, by another stream, is not the end
      collective.end = cut_at_;
    }
    collective.waited += length;
    if (length >= kShort) {
      events_.waits.push_back({found->second, begin, cut_at_});
    }
  }

  // ---------------------------------------------------------- Time and memory

  int64_t now() const {
    return to_ns(Clock::now() - start_);
  }

  /// Makes a slice of the time since the last cut.
  void cut() {
    const auto begin = std::exchange(cut_at_, now());
    const Open nothing{.name = "other"};
    const auto& doing = open_.empty() ? nothing : open_.back();
    const auto& name = doing.name.empty() ? kRoot : doing.name;
    auto* last = events_.slices.empty() ? nullptr : &events_.slices.back();
    if (last && last->activity == doing.activity && last->name == name &&
        begin - last->end < kShort) {
      last->end = cut_at_;
    } else if (cut_at_ - begin >= kShort) {
      events_.slices.push_back({doing.activity, name, begin, cut_at_});
    }
  }

  void end_step() {
    if (!events_.steps.empty() && events_.steps.back().end < 0) {
      events_.steps.back().end = cut_at_;
    }
  }

  void sample_memory() {
    if (options_.memory) {
      events_.memory.push_back({now(), memory_stats(options_.device)});
    }
  }

  inline static const std::string kRoot = "(root)";
  static thread_local Recorder* mine;

  const TraceOptions options_;
  const Clock::time_point start_ = Clock::now();
  const int64_t began_ = std::chrono::duration_cast<std::chrono::nanoseconds>(
                             std::chrono::system_clock::now().time_since_epoch())
                             .count();
  bool recording_ = true;
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
  std::vector<Open> open_;
  int num_ranges_ = 0;
  int64_t cut_at_ = 0;
  int64_t waited_ = 0;
  std::unordered_map<uint64_t, size_t> indices_; // of collectives, by id
  detail::TraceEvents events_;
};

thread_local Trace::Recorder* Trace::Recorder::mine = nullptr;

Trace::Trace(const TraceOptions& options) : recorder_(std::make_unique<Recorder>(options)) {}

Trace::~Trace() = default;

void Trace::begin_step(int64_t step) {
  recorder_->begin_step(step);
}

void Trace::stop() {
  recorder_->stop();
}

double Trace::waited_s() const {
  return static_cast<double>(recorder_->waited()) * 1e-9;
}

std::string Trace::json() {
  stop();
  return detail::chrome_trace(
      {detail::chrome_events(recorder_->events(), detail::current_world().rank, 0)});
}

void Trace::write(const std::filesystem::path& path) {
  stop();
  const auto began = gather_texts(std::to_string(recorder_->began()));
  int64_t first = recorder_->began();
  for (const auto& text : began) {
    first = std::min<int64_t>(first, std::stoll(text));
  }
  const auto rank = detail::current_world().rank;
  const auto events =
      gather_texts(detail::chrome_events(recorder_->events(), rank, recorder_->began() - first));
  std::string error;
  try {
    if (rank == 0) {
      detail::write_text(path, detail::chrome_trace(events));
    }
  } catch (const CheckpointError&) {
    error = detail::current_exception_text();
  }
  const auto errors = gather_texts(error);
  TORCH_CHECK(errors[0].empty(), "[Trace] rank 0 cannot write ", path.string(), ": ", errors[0]);
}

struct WaitTimer::Observer : detail::CollectiveObserver {
  void on_collective(const detail::ObservedCollective&) override {}
  void on_wait_begin(uint64_t /*id*/) override {
    begin = Clock::now();
  }
  void on_wait_end(uint64_t /*id*/) override {
    waited += Clock::now() - begin;
  }

  Clock::time_point begin;
  Clock::duration waited{};
};

WaitTimer::WaitTimer() : observer_(std::make_unique<Observer>()) {}

WaitTimer::~WaitTimer() = default;

double WaitTimer::seconds() const {
  return static_cast<double>(to_ns(observer_->waited)) * 1e-9;
}

void WaitTimer::reset() {
  observer_->waited = {};
}

} // namespace fsdp
