// What we save read by Python's safetensors and torch.distributed.checkpoint, and
// what they save read by us. The Python side is interop.py.
#include <fsdp/checkpoint.h>
#include <fsdp/checkpoint_tools.h>
#include <gtest/gtest.h>

#include "checkpoint/interop.h"

namespace fsdp {
namespace {

using namespace test;

TEST(PythonInterop, PythonReadsWhatWeSave) {
  const auto folder = temporary_folder();
  run_ranks(4, [&](int) {
    auto state = make_state(specs(), true);
    save_hf(state, folder + "/hf", {.max_file_bytes = 300});
    state.insert("step", int64_t{7}); // is in the manifest, where Python does not look
    save(state, folder + "/sharded");
  });
  RUN_INTEROP("interop.py", "read", spec_text(specs()), folder + "/sharded", folder + "/hf");
}

TEST(PythonInterop, PythonReadsWhatWeConvert) {
  const auto folder = temporary_folder();
  run_ranks(2, [&](int) { save(make_state(specs(), true), folder + "/two"); });
  convert_checkpoint(folder + "/two", folder + "/hf", {.max_file_bytes = 300});
  convert_checkpoint(
      folder + "/hf", folder + "/sharded",
      {.format = ConvertOptions::Format::sharded, .num_ranks = 3});
  RUN_INTEROP("interop.py", "read", spec_text(specs()), folder + "/sharded", folder + "/hf");
}

TEST(PythonInterop, WeReadWhatPythonSaves) {
  const auto folder = temporary_folder();
  RUN_INTEROP("interop.py", "write", spec_text(specs()), folder);
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
