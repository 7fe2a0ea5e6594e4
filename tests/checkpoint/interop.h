#pragma once

// Tensors that Python and C++ make alike, see interop.py.

#include <fsdp/checkpoint.h>
#include <fsdp/distributed.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "checkpoint/safetensors.h"
#include "support/processes.h"
#include "support/tensors.h"

namespace fsdp::test {

struct Spec {
  std::string name;
  std::string dtype; // as the files have it
  std::vector<int64_t> sizes;
  std::optional<int64_t> shard_dim = {}; // none: a plain tensor
};

inline std::vector<Spec> specs() {
  return {
      {"rows", "F32", {13, 6}, 0},
      {"cols", "BF16", {5, 9}, 1},
      {"middle", "F64", {3, 8, 2}, 1},
      {"half", "F16", {6}, 0},
      {"few", "F64", {1, 3}, 0},
      {"e4", "F8_E4M3", {7, 2}, 0},
      {"e5", "F8_E5M2", {3, 5}, 1},
      {"i64", "I64", {4}, 0},
      {"i32", "I32", {7}},
      {"i16", "I16", {5, 3}, 1},
      {"i8", "I8", {9}},
      {"u8", "U8", {10}, 0},
      {"u16", "U16", {5, 2}, 0},
      {"u32", "U32", {3}, 0},
      {"u64", "U64", {3}},
      {"flags", "BOOL", {11}, 0},
      {"complex", "C64", {3, 2}, 0},
      {"number", "F32", {}},
      {"nothing", "F32", {0, 3}, 0},
      {"no_columns", "BF16", {3, 0}}};
}

inline std::string spec_text(const std::vector<Spec>& all) {
  auto list = nlohmann::json::array();
  for (const auto& spec : all) {
    auto dim = spec.shard_dim ? nlohmann::json(*spec.shard_dim) : nlohmann::json();
    list.push_back(nlohmann::json::array({spec.name, spec.dtype, spec.sizes, dim}));
  }
  return list.dump();
}

/// The same bytes as interop.py makes.
inline torch::Tensor values_of(const Spec& spec) {
  const auto dtype = detail::dtype_of(spec.dtype, spec.name);
  const auto bytes = detail::tensor_bytes(spec.sizes, dtype).value();
  const auto numbers = torch::arange(bytes).mul(7).add(static_cast<int64_t>(spec.name.size()));
  return numbers.remainder(spec.dtype == "BOOL" ? 2 : 120)
      .to(torch::kUInt8)
      .view(dtype)
      .view(spec.sizes);
}

/// This rank's part, as torch's chunk has it.
inline torch::Tensor local_part(const torch::Tensor& whole, const Spec& spec) {
  if (!spec.shard_dim) {
    return whole.clone();
  }
  const auto size = whole.size(*spec.shard_dim);
  const auto chunk = (size + get_world_size() - 1) / get_world_size();
  const auto begin = std::min(size, chunk * get_rank());
  return whole.narrow(*spec.shard_dim, begin, std::min(chunk, size - begin)).clone();
}

/// Without collectives: not every dtype can be sent.
inline StateDict make_state(const std::vector<Spec>& all, bool with_values) {
  const auto mesh = init_device_mesh(at::kCPU, {get_world_size()});
  StateDict state;
  for (const auto& spec : all) {
    auto local = local_part(values_of(spec), spec);
    if (!with_values) {
      local = torch::zeros(local.nbytes(), torch::kUInt8).view(local.scalar_type()).view_as(local);
    }
    if (spec.shard_dim) {
      state.insert(
          spec.name, DTensor::from_local(local, mesh, {Shard{*spec.shard_dim}}, spec.sizes));
    } else {
      state.insert(spec.name, local);
    }
  }
  return state;
}

inline void expect_values(const StateDict& state, const std::vector<Spec>& all) {
  for (const auto& spec : all) {
    const auto& value = state.at(spec.name);
    const auto* spread = std::get_if<DTensor>(&value);
    const auto local = spread ? spread->to_local() : std::get<at::Tensor>(value);
    EXPECT_TRUE(same(local, local_part(values_of(spec), spec))) << spec.name;
  }
}

/// Runs a script of this folder. Exit code 77: Python lacks something.
#define RUN_INTEROP(script, ...)                                                                  \
  if (std::string(FSDP_TEST_PYTHON).empty()) {                                                    \
    GTEST_SKIP() << "built without FSDP_PYTHON";                                                  \
  }                                                                                               \
  const auto ended =                                                                              \
      run_commands({{{FSDP_TEST_PYTHON, FSDP_TEST_DIR "/checkpoint/" script, __VA_ARGS__}, {}}}); \
  if (ended[0].exit_code == 77) {                                                                 \
    GTEST_SKIP() << ended[0].output;                                                              \
  }                                                                                               \
  ASSERT_EQ(ended[0].exit_code, 0) << ended[0].output

} // namespace fsdp::test
