#include "runtime/comm_streams.h"

#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace fsdp::detail {

namespace {

constexpr int kRing = 32; // number of streams that torch has per device and priority

/// Streams that belong to a rank.
struct StreamRegistry {
  std::mutex mutex;
  std::set<std::pair<c10::DeviceIndex, c10::StreamId>> streams;
};

/// Never destroyed, because ranks may end after static objects are destroyed.
StreamRegistry& stream_registry() {
  static auto* const made = new StreamRegistry;
  return *made;
}

/// Returns nothing if all streams are taken.
OptionalStream take_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  std::lock_guard lock(stream_registry().mutex); // held for the whole ring, to miss no free stream
  for (int i = 0; i < kRing; ++i) {
    const auto stream = guard.getNewStream(device, /*priority=*/-1);
    if (stream_registry().streams.emplace(stream.device_index(), stream.id()).second) {
      return stream;
    }
  }
  return std::nullopt;
}

/// Waits for the streams, because their next owner does not know what is still queued on them.
void finish(const CommStreams& streams) {
  try {
    for (const auto& stream :
         {streams.copy_in, streams.all_gather, streams.reduce_scatter, streams.all_reduce}) {
      stream->synchronize();
    }
  } catch (const std::exception&) { // the device is lost, or the process is ending
  }
}

void give_back_streams(const CommStreams& streams) {
  std::lock_guard lock(stream_registry().mutex);
  for (const auto& stream :
       {streams.copy_in, streams.all_gather, streams.reduce_scatter, streams.all_reduce}) {
    if (stream) {
      stream_registry().streams.erase({stream->device_index(), stream->id()});
    }
  }
}

} // namespace

std::shared_ptr<const CommStreams> comm_streams(c10::Device device) {
  if (!has_streams(device)) {
    static const auto none = std::make_shared<const CommStreams>();
    return none;
  }
  thread_local std::unordered_map<c10::Device, std::shared_ptr<const CommStreams>> mine;
  auto& streams = mine[device];
  if (!streams) {
    CommStreams all{
        take_stream(device), take_stream(device), take_stream(device), take_stream(device)};
    if (!all.all_reduce) { // too many ranks: this rank communicates on its compute stream
      give_back_streams(all);
      const auto current = optional_current_stream(device);
      return std::make_shared<const CommStreams>(CommStreams{current, current, current, current});
    }
    streams =
        std::shared_ptr<const CommStreams>(new CommStreams(all), [](const CommStreams* unused) {
          finish(*unused);
          give_back_streams(*unused);
          delete unused;
        });
  }
  return streams;
}

} // namespace fsdp::detail
