#include <ATen/ATen.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
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

/// Asks for huge pages, because the first save touches all of the memory. This is only a hint.
void use_huge_pages(void* data, size_t bytes) {
  constexpr uintptr_t kPage = 2 << 20;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (begin < end) {
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
}

/// Copies without filling the caches, which hold what training needs next. A core that reads one
/// line after the other waits for memory most of the time. Reading six streams in turn, with
/// prefetches, takes half of memcpy's time. `to` must be aligned to 16 bytes.
void copy_past_caches(char* to, const char* from, size_t bytes) {
  size_t done = 0;
#if defined(__SSE2__)
  constexpr size_t kStreams = 6, kLine = 64, kAhead = 1024;
  const size_t length = bytes / (kStreams * kLine) * kLine; // bytes of each stream
  done = kStreams * length;
  for (size_t line = 0; line < length; line += kLine) {
    for (size_t at = line; at < done; at += length) {
      _mm_prefetch(from + at + kAhead, _MM_HINT_T0); // only a hint, so it may be past the end
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

/// Lowers the calling thread's priority, to about a tenth of a core if all cores are wanted. A
/// lower priority would stop it: a thread that waits for it cannot raise its priority again, and
/// other programs may keep the cores busy.
void give_way() {
  constexpr int kNice = 10;
  const auto thread = static_cast<id_t>(gettid());
  (void)setpriority(PRIO_PROCESS, thread, std::max(getpriority(PRIO_PROCESS, thread), kNice));
}

/// A rank's save in the background, and the host memory that the tensors are copied to. The next
/// save uses the memory again: memory that has been used before is several times faster. All
/// threads without a world share one Background.
class Background {
 public:
  ~Background() {
    wait();
    warn();
  }

  /// Warns if the last save failed and no later call has thrown its error.
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

  /// Waits for the save. If it failed, throws its error, once.
  void finish() {
    const std::lock_guard lock(mutex_);
    wait();
    if (auto error = std::exchange(error_, nullptr)) {
      std::rethrow_exception(error);
    }
  }

  /// Copies the tensors, and starts a thread that does the rest.
  std::future<void> start(SaveJob job, SeriesSteps steps) {
    const std::lock_guard lock(mutex_);
    wait(); // another thread may have started a save since `finish`
    try {
      copy_parts(job.plan.parts);
    } catch (const std::exception&) { // no memory: the futures of all ranks get the error
      job.error = current_exception_text();
      job.plan.parts.clear();
    }
    job.is_direct = true; // training needs the processor and the page cache
    std::promise<void> promise;
    auto future = promise.get_future();
    thread_ = std::thread([this, job = std::move(job), steps = std::move(steps),
                           promise = std::move(promise)]() mutable {
      give_way();
      try {
        run_save(job, steps);
        job = {}; // drop the views of the memory before the future is ready
        promise.set_value();
      } catch (...) {
        error_ = std::current_exception();
        promise.set_exception(error_);
      }
    });
    return future;
  }

 private:
  /// Replaces the data of the parts by copies, one after the other in host memory.
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
      memory_ = at::Tensor(); // free the old memory before the new is allocated
      memory_ = at::empty({total}, at::device(at::kCPU).dtype(at::kByte).pinned_memory(on_device));
      use_huge_pages(memory_.mutable_data_ptr(), static_cast<size_t>(total));
    }
    int64_t offset = 0;
    std::unordered_set<at::Device> devices;
    for (auto& part : parts) {
      const auto bytes = static_cast<int64_t>(part.data.nbytes());
      auto copy =
          memory_.narrow(0, offset, bytes).view(part.data.scalar_type()).view(part.data.sizes());
      // The bytes of a lazy conjugate or negative are not its values yet.
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
    for (const auto device : devices) { // wait once per device, not once per tensor
      StreamEvent::of(optional_current_stream(device)).synchronize();
    }
  }

  std::mutex mutex_;
  std::thread thread_;
  std::exception_ptr error_;
  at::Tensor memory_; // 1D bytes
};

/// Holds the Background of each rank until the rank's world is gone. Ranks may be threads of one
/// process.
class Backgrounds {
 public:
  /// Waits for the saves that are under way when the process ends. Does not free their memory:
  /// pinned memory cannot be freed after CUDA's own objects are destroyed.
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

  /// Removes and returns the Backgrounds of ranks whose world is gone. Their destructors wait for
  /// their saves. So do not destroy them after the ranks have agreed on a save and before this
  /// rank's part of it has started: one of them may be part of this save and wait for this rank.
  std::vector<std::shared_ptr<Background>> take_those_without_world() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Background>> gone;
    std::erase_if(all_, [&](auto& item) {
      const bool is_gone = item.first.expired() && has_world(item.first);
      if (is_gone) {
        gone.push_back(std::move(item.second));
      }
      return is_gone;
    });
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
  } catch (...) { // no thread started: the other ranks must not wait
    give_up(publication, c10::str("rank ", publication.ranks.rank, ": ", current_exception_text()));
    throw;
  }
}

} // namespace fsdp::detail

std::future<void> fsdp::async_save(
    const StateDict& state, const std::filesystem::path& path, const SaveOptions& options) {
  return detail::async_save(state, path, options, {});
}
