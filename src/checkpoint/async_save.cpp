#include <ATen/ATen.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <vector>

#include "base/check.h"
#include "checkpoint/writer.h"
#include "process_group/rank_context.h"
#include "runtime/stream.h"

namespace fsdp::detail {

namespace {

/// A hint: the first save touches all of the memory, a page at a time.
void use_huge_pages(void* data, size_t bytes) {
  constexpr uintptr_t kPage = 2 << 20;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (begin < end) {
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
}

/// Past the caches, which hold what training needs next. A core that reads in a row waits
/// for memory most of the time: six places in turn, each a bit ahead, take half of memcpy's
/// time. `to` is aligned to 16 bytes.
void copy_past_caches(char* to, const char* from, size_t bytes) {
  size_t done = 0;
#if defined(__SSE2__)
  constexpr size_t kPlaces = 6, kLine = 64, kAhead = 1024;
  const size_t length = bytes / (kPlaces * kLine) * kLine; // from each place
  done = kPlaces * length;
  for (size_t line = 0; line < length; line += kLine) {
    for (size_t at = line; at < done; at += length) {
      _mm_prefetch(from + at + kAhead, _MM_HINT_T0); // may be past the end: only a hint
      const auto* in = reinterpret_cast<const __m128i*>(from + at);
      auto* out = reinterpret_cast<__m128i*>(to + at);
      const auto a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
      const auto c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, d);
    }
  }
  _mm_sfence();
#endif
  std::memcpy(to + done, from + done, bytes - done);
}

/// The calling thread takes a tenth of a core where others want all of them. Not less: who
/// waits for it cannot give it its priority back, and other programs may keep cores busy.
void give_way() {
  constexpr int kNice = 10;
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNice);
}

/// A rank's save in the background, and the host memory that it and the next ones
/// copy the tensors to: memory that has been used before is several times faster.
/// Threads without a world are one rank together.
class Background {
 public:
  ~Background() {
    wait();
    warn();
  }

  /// Of a failure that nobody will hear of otherwise.
  void warn() {
    try {
      if (auto error = std::exchange(error_, nullptr)) {
        std::rethrow_exception(error);
      }
    } catch (const std::exception&) {
      TORCH_WARN("[async_save] the last save failed: ", current_exception_text());
    }
  }

  void wait() {
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  /// Waits, and throws what the save threw, once.
  void finish() {
    const std::lock_guard lock(mutex_);
    wait();
    if (auto error = std::exchange(error_, nullptr)) {
      std::rethrow_exception(error);
    }
  }

  /// Copies the tensors, and leaves the rest to a thread.
  std::future<void> start(SaveJob job, SeriesSteps steps) {
    const std::lock_guard lock(mutex_);
    wait(); // for one of another thread, started since `finish`
    try {
      copy_parts(job.plan.parts);
    } catch (const std::exception&) { // no memory: all ranks hear of it in their futures
      job.error = current_exception_text();
      job.plan.parts.clear();
    }
    job.is_direct = true; // training needs the processor, and what is in the page cache
    std::promise<void> promise;
    auto future = promise.get_future();
    thread_ = std::thread([this, job = std::move(job), steps = std::move(steps),
                           promise = std::move(promise)]() mutable {
      give_way();
      try {
        run_save(job, steps);
        job = {}; // the memory is free for the next one before the future is ready
        promise.set_value();
      } catch (...) {
        error_ = std::current_exception();
        promise.set_exception(error_);
      }
    });
    return future;
  }

 private:
  /// Copies of the parts, one behind the other in host memory.
  void copy_parts(std::vector<Part>& parts) {
    constexpr int64_t kAlignment = 64;
    const auto aligned = [](int64_t bytes) {
      return (bytes + kAlignment - 1) / kAlignment * kAlignment;
    };
    int64_t total = 0;
    bool on_device = false;
    for (const auto& part : parts) {
      total += aligned(static_cast<int64_t>(part.data.nbytes()));
      on_device = on_device || part.data.is_cuda();
    }
    if (!memory_.defined() || memory_.numel() < total || (on_device && !memory_.is_pinned())) {
      memory_ = at::Tensor(); // never both
      memory_ = at::empty({total}, at::device(at::kCPU).dtype(at::kByte).pinned_memory(on_device));
      use_huge_pages(memory_.mutable_data_ptr(), static_cast<size_t>(total));
    }
    int64_t offset = 0;
    std::unordered_set<at::Device> devices;
    for (auto& part : parts) {
      const auto bytes = static_cast<int64_t>(part.data.nbytes());
      auto copy =
          memory_.narrow(0, offset, bytes).view(part.data.scalar_type()).view(part.data.sizes());
      // Their bytes, where they stand for others: conjugates and negatives.
      const auto data = part.data.resolve_conj().resolve_neg();
      if (data.is_cpu() && data.is_contiguous()) {
        copy_past_caches(
            static_cast<char*>(copy.mutable_data_ptr()),
            static_cast<const char*>(data.const_data_ptr()), data.nbytes());
      } else {
        copy.copy_(data, /*non_blocking=*/true);
        devices.insert(data.device());
      }
      part.data = std::move(copy);
      offset += aligned(bytes);
    }
    for (const auto device : devices) { // once, not for each tensor
      StreamEvent::of(optional_current_stream(device)).synchronize();
    }
  }

  std::mutex mutex_;
  std::thread thread_;
  std::exception_ptr error_;
  at::Tensor memory_; // 1D bytes
};

/// Ranks may be threads of one process: each has its own, until its world is gone.
class Backgrounds {
 public:
  /// Those under way when the process ends are waited for. Their memory is never freed
  /// then: pinned memory cannot be, once CUDA's own objects have gone.
  ~Backgrounds() {
    for (const auto& item : all_) {
      item.second->wait();
      item.second->warn();
    }
  }

  std::shared_ptr<Background> current() {
    const std::lock_guard lock(mutex_);
    auto& background = all_[Key(current_context())];
    if (!background) {
      background = std::make_shared<Background>();
    }
    return background;
  }

  /// Who drops them waits for their saves: not between the agreement on a save and its
  /// start, since one of them may be part of it and wait for ours.
  std::vector<std::shared_ptr<Background>> take_those_without_world() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Background>> gone;
    for (auto item = all_.begin(); item != all_.end();) {
      const bool is_gone = item->first.expired() && has_world(item->first);
      if (is_gone) {
        gone.push_back(std::move(item->second));
      }
      item = is_gone ? all_.erase(item) : std::next(item);
    }
    return gone;
  }

 private:
  using Key = std::weak_ptr<RankContext>;
  static bool has_world(const Key& key) {
    const Key none;
    return key.owner_before(none) || none.owner_before(key);
  }

  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Background>, std::owner_less<>>& all_ =
      *new std::map<Key, std::shared_ptr<Background>, std::owner_less<>>;
};

Backgrounds& backgrounds() {
  static Backgrounds all;
  return all;
}

} // namespace

void finish_previous_save() {
  backgrounds().take_those_without_world().clear();
  backgrounds().current()->finish();
}

std::future<void> async_save(
    const StateDict& state,
    const Path& path,
    const SaveOptions& options,
    const SeriesSteps& steps) {
  at::NoGradGuard no_grad;
  auto job = begin_save(state, path, options, steps.leftovers);
  const auto publication = job.publication;
  try {
    return backgrounds().current()->start(std::move(job), steps);
  } catch (...) { // no thread: the others must not wait for this rank
    give_up(publication, c10::str("rank ", publication.rank, ": ", current_exception_text()));
    throw;
  }
}

} // namespace fsdp::detail
