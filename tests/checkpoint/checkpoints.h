#pragma once

// State dicts to save and to compare, and broken checkpoints.

#include <fsdp/checkpoint.h>
#include <fsdp/distributed.h>
#include <fsdp/error.h>

#include <cmath>
#include <fstream>
#include <sstream>

#include "base/check.h"
#include "base/files.h"
#include "checkpoint/catalog.h"
#include "checkpoint/manifest.h"
#include "support/processes.h"
#include "support/tensors.h"

namespace fsdp::test {

using Placements = std::vector<Placement>;

inline StateDict state_with(const std::string& key, StateDict::Value value) {
  StateDict state;
  state.insert(key, std::move(value));
  return state;
}

/// A tensor that is spread, or plain where there are no placements.
struct Sample {
  std::string key;
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  std::vector<Placement> placements = {};
};

/// All different values; `seed` tells one state from another.
inline torch::Tensor sample_values(const Sample& sample, int64_t seed) {
  const auto numel = c10::multiply_integers(sample.sizes);
  const auto numbers =
      torch::arange(numel).add(seed * 17 + static_cast<int64_t>(sample.key.size()));
  return numbers.remainder(sample.dtype == at::kBool ? 2 : 120).view(sample.sizes).to(sample.dtype);
}

inline StateDict make_state(
    const std::vector<Sample>& samples, const DeviceMesh& mesh, int64_t seed) {
  StateDict state;
  for (const auto& sample : samples) {
    const auto values = sample_values(sample, seed);
    if (sample.placements.empty()) {
      state.insert(sample.key, values);
    } else {
      state.insert(sample.key, distribute_tensor(values, mesh, sample.placements));
    }
  }
  state.insert("step", seed);
  return state;
}

inline torch::Tensor whole(const StateDict::Value& value) {
  const auto* spread = std::get_if<DTensor>(&value);
  return spread ? spread->full_tensor() : std::get<at::Tensor>(value);
}

inline void expect_state(const StateDict& state, const std::vector<Sample>& samples, int64_t seed) {
  for (const auto& sample : samples) {
    EXPECT_SAME(whole(state.at(sample.key)), sample_values(sample, seed)) << sample.key;
  }
  EXPECT_EQ(std::get<int64_t>(state.at("step")), seed);
}

/// Every way of sharding over one axis: uneven, empty, in several boxes.
inline std::vector<Sample> samples_1d() {
  return {
      {"rows", {13, 6}, at::kFloat, {Shard{0}}},
      {"cols", {5, 9}, at::kBFloat16, {Shard{1}}},
      {"middle", {3, 8, 2}, at::kDouble, {Shard{1}}},
      {"few", {2, 3}, at::kDouble, {Shard{0}}},
      {"flags", {11}, at::kBool, {Shard{0}}},
      {"strided", {12, 2}, at::kFloat, {StridedShard{0, 2}}},
      {"strided_cols", {3, 10}, at::kInt, {StridedShard{1, 3}}},
      {"blocks", {3, 5, 2}, at::kFloat, {BlockShard{2}}},
      {"same", {4, 4}, at::kHalf, {Replicate{}}},
      {"nothing", {0, 3}, at::kFloat, {Shard{0}}},
      {"plain", {7}, at::kLong},
      {"number", {}, at::kFloat}};
}

/// The same tensors, sharded in another way.
inline std::vector<Sample> resharded(std::vector<Sample> samples) {
  for (auto& sample : samples) {
    const auto dims = static_cast<int64_t>(sample.sizes.size());
    for (auto& placement : sample.placements) {
      placement = Shard{dims - 1};
    }
    if (sample.key == "rows") {
      sample.placements.assign(sample.placements.size(), Replicate{});
    }
  }
  return samples;
}

inline DeviceMesh world_mesh() {
  return init_device_mesh(at::kCPU, {get_world_size()});
}

inline void save_samples(int num_ranks, const std::string& path, int64_t seed) {
  run_ranks(num_ranks, [&](int) { save(make_state(samples_1d(), world_mesh(), seed), path); });
}

inline void expect_loads(int num_ranks, const std::string& path, int64_t seed) {
  run_ranks(num_ranks, [&](int) {
    const auto samples = samples_1d();
    auto state = make_state(samples, world_mesh(), -1);
    load(state, path);
    expect_state(state, samples, seed);
  });
}

/// What loading on two ranks says; nothing may have changed on any of them.
inline std::string load_error(const std::string& path, const LoadOptions& options = {}) {
  std::string messages[2];
  run_ranks(2, [&](int rank) {
    const auto samples = samples_1d();
    auto state = make_state(samples, world_mesh(), -1);
    messages[rank] = message_of<CheckpointError>([&] { load(state, path, options); });
    expect_state(state, samples, -1);
  });
  EXPECT_FALSE(messages[0].empty());
  EXPECT_TRUE(contains(messages[0], "rank ")) << "the message names the rank";
  return messages[0];
}

inline void set_file_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

/// Replaces the first `from` in the manifest, and makes its checksum right again.
inline void edit_manifest(
    const std::string& folder, const std::string& from, const std::string& to) {
  const auto path = folder + "/manifest.json";
  auto text = file_text(path);
  const auto at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  const auto rest = text.substr(detail::manifest_checksum("").size());
  set_file_text(path, detail::manifest_checksum(rest) + rest);
}

/// Nobody has touched it for two hours.
inline void make_old(const detail::Path& path) {
  if (detail::is_folder(path)) {
    for (const auto& name : detail::list_folder(path)) {
      make_old(path / name);
    }
  }
  const auto then = time(nullptr) - 7200;
  const timespec times[2] = {{then, 0}, {then, 0}};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW), 0);
}

/// Names beside the checkpoints that saves leave while they are under way.
inline std::vector<std::string> leftovers(const std::string& folder) {
  std::vector<std::string> found;
  for (const auto& name : detail::list_folder(folder)) {
    if (name.find(".fsdp-") != std::string::npos) {
      found.push_back(name);
    }
  }
  return found;
}

/// Fails, blocks or counts file operations while it lives.
class ChangeHook {
 public:
  explicit ChangeHook(std::function<void(const char*, const detail::Path&)> hook) {
    detail::before_change = std::move(hook);
  }
  ~ChangeHook() {
    detail::before_change = {};
  }
  /// Throws `message` before each such operation on a file whose path has this part.
  static ChangeHook failing(
      const std::string& operation, const std::string& part, const std::string& message) {
    return ChangeHook([=](const char* doing, const detail::Path& where) {
      if (doing == operation && where.string().find(part) != std::string::npos) {
        FSDP_THROW(CheckpointError, message);
      }
    });
  }
  ChangeHook(const ChangeHook&) = delete;
  ChangeHook& operator=(const ChangeHook&) = delete;
};

} // namespace fsdp::test
