// What we save read by Python's safetensors and torch.distributed.checkpoint, and
// what they save read by us. The Python side is interop.py.
#include <fsdp/checkpoint.h>
#include <fsdp/checkpoint_tools.h>
#include <fsdp/distributed.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/files.h"
#include "checkpoint/safetensors.h"
#include "support/processes.h"
#include "support/tensors.h"

namespace fsdp {
namespace {

using namespace test;

struct Spec {
  std::string name;
  std::string dtype; // as the files have it
  std::vector<int64_t> sizes;
  std::optional<int64_t> shard_dim = {}; // none: a plain tensor
};

std::vector<Spec> specs() {
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

std::string spec_text(const std::vector<Spec>& all) {
  auto list = nlohmann::json::array();
  for (const auto& spec : all) {
    auto dim = spec.shard_dim ? nlohmann::json(*spec.shard_dim) : nlohmann::json();
    list.push_back(nlohmann::json::array({spec.name, spec.dtype, spec.sizes, dim}));
  }
  return list.dump();
}

/// The same bytes as interop.py makes.
torch::Tensor values_of(const Spec& spec) {
  const auto dtype = detail::dtype_of(spec.dtype, spec.name);
  const auto bytes = detail::tensor_bytes(spec.sizes, dtype).value();
  const auto numbers = torch::arange(bytes).mul(7).add(static_cast<int64_t>(spec.name.size()));
  return numbers.remainder(spec.dtype == "BOOL" ? 2 : 120)
      .to(torch::kUInt8)
      .view(dtype)
      .view(spec.sizes);
}

/// This rank's part, as torch's chunk has it.
torch::Tensor local_part(const torch::Tensor& whole, const Spec& spec) {
  if (!spec.shard_dim) {
    return whole.clone();
  }
  const auto size = whole.size(*spec.shard_dim);
  const auto chunk = (size + get_world_size() - 1) / get_world_size();
  const auto begin = std::min(size, chunk * get_rank());
  return whole.narrow(*spec.shard_dim, begin, std::min(chunk, size - begin)).clone();
}

/// Without collectives: not every dtype can be sent.
StateDict make_state(const std::vector<Spec>& all, bool with_values) {
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

void expect_values(const StateDict& state, const std::vector<Spec>& all) {
  for (const auto& spec : all) {
    const auto& value = state.at(spec.name);
    const auto* spread = std::get_if<DTensor>(&value);
    const auto local = spread ? spread->to_local() : std::get<at::Tensor>(value);
    EXPECT_TRUE(same(local, local_part(values_of(spec), spec))) << spec.name;
  }
}

/// Exit code 77: Python lacks something.
#define RUN_INTEROP(...)                                                                \
  if (std::string(FSDP_TEST_PYTHON).empty()) {                                          \
    GTEST_SKIP() << "built without FSDP_PYTHON";                                        \
  }                                                                                     \
  const auto ended = run_commands(                                                      \
      {{{FSDP_TEST_PYTHON, FSDP_TEST_DIR "/checkpoint/interop.py", __VA_ARGS__}, {}}}); \
  if (ended[0].exit_code == 77) {                                                       \
    GTEST_SKIP() << ended[0].output;                                                    \
  }                                                                                     \
  ASSERT_EQ(ended[0].exit_code, 0) << ended[0].output

TEST(PythonInterop, PythonReadsWhatWeSave) {
  const auto folder = temporary_folder();
  run_ranks(4, [&](int) {
    auto state = make_state(specs(), true);
    save_hf(state, folder + "/hf", {.max_file_bytes = 300});
    state.insert("step", int64_t{7}); // is in the manifest, where Python does not look
    save(state, folder + "/sharded");
  });
  RUN_INTEROP("read", spec_text(specs()), folder + "/sharded", folder + "/hf");
}

TEST(PythonInterop, PythonReadsWhatWeConvert) {
  const auto folder = temporary_folder();
  run_ranks(2, [&](int) { save(make_state(specs(), true), folder + "/two"); });
  convert_checkpoint(folder + "/two", folder + "/hf", {.max_file_bytes = 300});
  convert_checkpoint(
      folder + "/hf", folder + "/sharded",
      {.format = ConvertOptions::Format::sharded, .num_ranks = 3});
  RUN_INTEROP("read", spec_text(specs()), folder + "/sharded", folder + "/hf");
}

TEST(PythonInterop, WeReadWhatPythonSaves) {
  const auto folder = temporary_folder();
  RUN_INTEROP("write", spec_text(specs()), folder);
  auto floats = specs(); // torch 2.13 cannot consolidate others
  std::erase_if(floats, [](const auto& spec) {
    return (spec.dtype[0] != 'F' && spec.dtype != "BF16") || spec.sizes.empty();
  });
  for (const auto* name :
       {"single.safetensors", "hf", "rank0", "dcp", "dcp_many", "consolidated",
        "consolidated/sharded"}) {
    const auto path = folder + "/" + name;
    const auto all = std::string(name).find("consolidated") == 0 ? floats : specs();
    for (const int ranks : {1, 2, 3}) {
      run_ranks(ranks, [&](int) {
        SCOPED_TRACE(name);
        auto state = make_state(all, false);
        load(state, path);
        expect_values(state, all);
      });
    }
    SCOPED_TRACE(name);
    const auto report = verify_checkpoint(path);
    EXPECT_TRUE(report.problems.empty()) << report.problems[0];
    EXPECT_EQ(report.unchecked_bytes, report.bytes) << "files of others have no checksums";
    EXPECT_EQ(report.num_tensors, static_cast<int64_t>(all.size()));
  }
}

} // namespace
} // namespace fsdp
