// How a recorded timeline becomes a Chrome trace.
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string_view>

#include "observe/trace_events.h"

namespace fsdp::detail {

namespace {

// Tracks, in the order in which they are shown.
constexpr int kSteps = 1;
constexpr int kCompute = 2;
constexpr int kWaiting = 3;
constexpr int kFirstLane = 10;
constexpr int kLanesOfAKind = 10;
constexpr std::array kLaneNames{"all-gather", "reduce-scatter", "all-reduce", "other collectives"};

int lane_of(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::AllGather:
      return 0;
    case CollectiveKind::ReduceScatter:
      return 1;
    case CollectiveKind::AllReduce:
      return 2;
    default:
      return 3;
  }
}

const char* to_string(Activity activity) {
  switch (activity) {
    case Activity::Forward:
      return "forward";
    case Activity::Backward:
      return "backward";
    case Activity::Optimizer:
      return "optimizer";
    case Activity::Sharding:
      return "sharding";
    case Activity::User:
      return "user";
    case Activity::Other:
      return "other";
  }
  return "?";
}

std::string quoted(const std::string& text) {
  using Json = nlohmann::json;
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// Returns microseconds with three decimals. A double would lose digits.
std::string micros(int64_t ns) {
  char text[32];
  std::snprintf(
      text, sizeof(text), "%lld.%03d", static_cast<long long>(ns / 1000),
      static_cast<int>(ns % 1000));
  return text;
}

class Writer {
 public:
  Writer(int rank, int64_t offset) : rank_(rank), offset_(offset) {}

  void metadata(const char* what, int track, const std::string& args) {
    event("M", what, track) += ",\"args\":{" + args + "}}";
  }
  void track(int track, const std::string& name) {
    metadata("thread_name", track, "\"name\":" + quoted(name));
    metadata("thread_sort_index", track, "\"sort_index\":" + std::to_string(track));
  }
  void slice(
      int track,
      const std::string& name,
      const char* category,
      int64_t begin,
      int64_t end,
      const std::string& args = "") {
    auto& text = event("X", name, track);
    text += ",\"cat\":\"" + std::string(category) + "\",\"ts\":" + micros(begin + offset_) +
            ",\"dur\":" + micros(end - begin);
    text += args.empty() ? "}" : ",\"args\":{" + args + "}}";
  }
  void counter(const std::string& name, int64_t at, const std::string& args) {
    event("C", name, 0) += ",\"ts\":" + micros(at + offset_) + ",\"args\":{" + args + "}}";
  }

  std::string take() {
    return std::move(text_);
  }

 private:
  std::string& event(const char* phase, const std::string& name, int track) {
    text_ += text_.empty() ? "" : ",\n";
    text_ += "{\"ph\":\"" + std::string(phase) + "\",\"pid\":" + std::to_string(rank_) +
             ",\"tid\":" + std::to_string(track) + ",\"name\":" + quoted(name);
    return text_;
  }

  const int rank_;
  const int64_t offset_;
  std::string text_;
};

/// "all_gather layers.0"
std::string name_of(const TracedCollective& collective) {
  return to_string(collective.kind) + (collective.module.empty() ? "" : " " + collective.module);
}

/// Slices of one track must not overlap, so collectives that run at the same time get different
/// tracks.
void write_collectives(Writer& writer, const std::vector<TracedCollective>& collectives) {
  std::array<std::vector<int64_t>, kLaneNames.size()> free_from; // by kind, of each of its tracks
  for (const auto& each : collectives) {
    if (each.end < 0) {
      continue;
    }
    const int kind = lane_of(each.kind);
    auto& tracks = free_from[kind];
    auto lane = std::find_if(
        tracks.begin(), tracks.end(), [&](int64_t from) { return from <= each.begin; });
    if (lane == tracks.end() && tracks.size() == kLanesOfAKind) {
      continue; // nobody looks at so many
    }
    const auto number = static_cast<int>(lane - tracks.begin());
    const int track = kFirstLane + kind * kLanesOfAKind + number;
    if (lane == tracks.end()) {
      tracks.push_back(0);
      lane = tracks.end() - 1;
      writer.track(track, kLaneNames[kind] + (number == 0 ? "" : " " + std::to_string(number + 1)));
    }
    *lane = each.end;
    writer.slice(
        track, name_of(each), to_string(each.kind), each.begin, each.end,
        "\"module\":" + quoted(each.module) + ",\"group\":" + quoted(each.group) +
            ",\"bytes\":" + std::to_string(each.bytes) + ",\"waited_us\":" + micros(each.waited));
  }
}

} // namespace

std::string chrome_events(const TraceEvents& events, int rank, int64_t offset) {
  Writer writer(rank, offset);
  writer.metadata("process_name", 0, "\"name\":\"rank " + std::to_string(rank) + "\"");
  writer.metadata("process_sort_index", 0, "\"sort_index\":" + std::to_string(rank));
  writer.track(kSteps, "steps");
  writer.track(kCompute, "compute");
  writer.track(kWaiting, "waiting");
  for (const auto& each : events.steps) {
    writer.slice(
        kSteps, "step " + std::to_string(each.step), "step", each.begin, each.end,
        "\"step\":" + std::to_string(each.step));
  }
  for (const auto& each : events.slices) {
    writer.slice(kCompute, each.name, to_string(each.activity), each.begin, each.end);
  }
  for (const auto& each : events.waits) {
    writer.slice(
        kWaiting, name_of(events.collectives[each.collective]), "waiting", each.begin, each.end);
  }
  write_collectives(writer, events.collectives);
  for (const auto& [at, stats] : events.memory) {
    std::string args;
    const auto add = [&](const char* name, int64_t bytes) {
      args += (args.empty() ? "\"" : ",\"") + std::string(name) + "\":" + std::to_string(bytes);
    };
    add("shards", stats.shards);
    add("gathered", stats.gathered);
    add("gradients", stats.gradients);
    add("communication", stats.communication);
    add("other", stats.other);
    writer.counter("memory", at, args);
  }
  return writer.take();
}

std::string chrome_trace(const std::vector<std::string>& events_by_rank) {
  std::string text =
      "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"format\":\"fsdp trace 1\","
      "\"ranks\":" +
      std::to_string(events_by_rank.size()) + "},\"traceEvents\":[\n";
  const char* separator = "";
  for (const auto& events : events_by_rank) {
    text += separator + events;
    separator = ",\n";
  }
  return text + "\n]}\n";
}

} // namespace fsdp::detail
