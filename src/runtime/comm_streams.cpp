#include "runtime/comm_streams.h"

#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace fsdp::detail {

namespace {

constexpr int kRing = 32; // number of streams that torch has per device and priority

/// Streams that belong to a rank.
struct Taken {
  std::mutex mutex;
  std::set<std::pair<c10::DeviceIndex, c10::StreamId>> streams;
};

/// Never destroyed, because ranks may end after static objects are destroyed.
Taken& taken() {
  static auto* const made = new Taken;
  return *made;
}

/// Returns nothing if all streams are taken.
OptionalStream take_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  std::lock_guard lock(taken().mutex); // held for the whole ring, so that no free stream is missed
  for (int i = 0; i < kRing; ++i) {
    const auto stream = guard.getNewStream(device, /*priority=*/-1);
    if (taken().streams.emplace(stream.device_index(), stream.id()).second) {
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
  std::lock_guard lock(taken().mutex);
  for (const auto& stream :
       {streams.copy_in, streams.all_gather, streams.reduce_scatter, streams.all_reduce}) {
    if (stream) {
      taken().streams.erase({stream->device_index(), stream->id()});
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
