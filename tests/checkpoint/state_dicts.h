#pragma once

#include <fsdp/random_state.h>
#include <fsdp/state_dict.h>

#include "parallel/tp_models.h"

namespace fsdp::test {

inline torch::Tensor local_of(const StateDict::Value& value) {
  const auto* placed = std::get_if<DTensor>(&value);
  return placed ? placed->to_local() : std::get<torch::Tensor>(value);
}

/// A dict that does not change when training goes on.
inline StateDict copy_of(const StateDict& state) {
  StateDict copy;
  for (const auto& [key, value] : state) {
    if (const auto* placed = std::get_if<DTensor>(&value)) {
      copy.insert(
          key, DTensor::from_local(
                   placed->to_local().clone(), placed->device_mesh(), placed->placements(),
                   placed->sizes().vec()));
    } else if (const auto* tensor = std::get_if<torch::Tensor>(&value)) {
      copy.insert(key, tensor->clone());
    } else {
      copy.insert(key, value);
    }
  }
  return copy;
}

/// Of whatever values; not while another rank draws those of a seed.
template <class Holder, class... Args>
Holder unseeded(const Args&... args) {
  std::lock_guard lock(default_generator_mutex);
  return Holder(args...);
}

/// Bit for bit, and of the same types, meshes and placements.
inline void expect_same_state(const StateDict& actual, const StateDict& expected) {
  ASSERT_EQ(actual.keys(), expected.keys());
  for (const auto& [key, value] : expected) {
    SCOPED_TRACE(key);
    const auto& got = actual.at(key);
    ASSERT_EQ(got.index(), value.index());
    if (value.index() < 2) {
      EXPECT_SAME(local_of(got), local_of(value));
    }
    if (const auto* placed = std::get_if<DTensor>(&value)) {
      const auto& other = std::get<DTensor>(got);
      EXPECT_EQ(other.device_mesh(), placed->device_mesh());
      EXPECT_EQ(other.placements(), placed->placements());
      EXPECT_EQ(other.sizes(), placed->sizes());
    } else if (value.index() > 1) {
      EXPECT_TRUE(std::visit(
          [&]<class T>(const T& number) {
            if constexpr (requires { number == std::get<T>(got); }) {
              if constexpr (!std::is_same_v<T, torch::Tensor>) {
                return number == std::get<T>(got);
              }
            }
            return false;
          },
          value));
    }
  }
}

inline const StateDictOptions kFull{.full_state_dict = true, .cpu_offload = true};
inline const StateDictOptions kFromRank0{.broadcast_from_rank0 = true};

/// The same batch on every rank, so that the number of ranks does not matter.
inline torch::Tensor same_batch(int step, at::IntArrayRef sizes) {
  return torch::randn(sizes, generator(1000 + step)).to(test_device());
}

} // namespace fsdp::test
