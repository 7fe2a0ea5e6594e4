// Folders that Python's torch.distributed.checkpoint wrote, read by us. The Python side is
// dcp_folders.py.
#include <fsdp/checkpoint.h>
#include <fsdp/checkpoint_tools.h>
#include <fsdp/fully_shard.h>
#include <fsdp/state_dict.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "checkpoint/checkpoints.h"
#include "checkpoint/interop.h"
#include "support/models.h"

namespace fsdp {
namespace {

using namespace test;

/// The folders are written once for all tests.
class DcpFolders : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    root_ = temporary_folder();
    write_folders();
  }
  void SetUp() override {
    if (!why_not_.empty()) {
      GTEST_SKIP() << why_not_;
    }
  }

  static std::string folder(const std::string& name) {
    return root_ + "/" + name;
  }

  /// A copy of a folder, to damage.
  static std::string copy_of(const std::string& name) {
    const auto copy = temporary_folder();
    for (const auto& file : detail::list_folder(folder(name))) {
      set_file_text(copy + "/" + file, file_text(folder(name) + "/" + file));
    }
    return copy;
  }

 private:
  static void write_folders() {
    if (std::string(FSDP_TEST_PYTHON).empty()) {
      why_not_ = "built without FSDP_PYTHON";
      return;
    }
    const std::string script = FSDP_TEST_DIR "/checkpoint/dcp_folders.py";
    const auto ended =
        run_commands({{{FSDP_TEST_PYTHON, script, spec_text(specs()), root_}, {}}})[0];
    why_not_ = ended.exit_code == 77 ? ended.output : "";
    ASSERT_TRUE(ended.exit_code == 0 || ended.exit_code == 77) << ended.output;
  }

  static inline std::string root_;
  static inline std::string why_not_; // is not empty if Python lacks something
};

std::string load_message(const std::string& path) {
  std::string message;
  run_ranks(1, [&](int) {
    auto state = make_state(specs(), false);
    message = message_of<CheckpointError>([&] { load(state, path); });
  });
  EXPECT_FALSE(message.empty());
  return message;
}

/// The only problem that verifying finds.
std::string problem_of(const std::string& path) {
  const auto report = verify_checkpoint(path);
  EXPECT_EQ(report.problems.size(), 1u);
  return report.problems.empty() ? "" : report.problems[0];
}

TEST_F(DcpFolders, LoadOnAnyNumberOfRanks) {
  for (const auto* name :
       {"plain", "strided", "views", "no_checksums", "sharded", "sharded_strided", "many_files",
        "threads", "overwritten"}) {
    SCOPED_TRACE(name);
    const auto path = folder(name);
    for (const int ranks : {1, 2, 3}) {
      SCOPED_TRACE(c10::str(ranks, " ranks"));
      run_ranks(ranks, [&](int) {
        for (const bool verify : {true, false}) {
          auto state = make_state(specs(), false);
          load(state, path, {.verify = verify});
          expect_values(state, specs());
        }
      });
    }
    const auto report = verify_checkpoint(path);
    EXPECT_TRUE(report.problems.empty()) << report.problems[0];
    EXPECT_GT(report.bytes, 0);
    EXPECT_EQ(report.unchecked_bytes, path.ends_with("no_checksums") ? report.bytes : 0);
  }
}

TEST_F(DcpFolders, AreInspected) {
  const auto plain = inspect_checkpoint(folder("plain"));
  EXPECT_TRUE(plain.is_dcp);
  EXPECT_FALSE(plain.is_ours);
  EXPECT_TRUE(plain.objects.empty());
  std::map<std::string, std::string> dtypes;
  for (const auto& tensor : plain.tensors) {
    dtypes[tensor.name] = tensor.dtype;
  }
  for (const auto& spec : specs()) {
    EXPECT_EQ(dtypes[spec.name], spec.dtype) << spec.name;
  }
  EXPECT_EQ(dtypes.size(), specs().size() + 2);
  EXPECT_EQ(dtypes["model.layers.0.weight"], "F32");
  EXPECT_EQ(dtypes["model.layers.1.weight"], "F32");
  using Values = decltype(plain.values);
  EXPECT_EQ(
      plain.values, (Values{
                        {"step", int64_t{7}},
                        {"large", -(int64_t{1} << 40)},
                        {"rate", 0.5},
                        {"endless", std::numeric_limits<double>::infinity()},
                        {"done", false},
                        {"name", std::string("größer")},
                        {"list.0", int64_t{1}},
                        {"list.1.0", 2.5},
                        {"list.1.1", std::string("x")},
                        {"list.2.deep.0", true},
                        {"by_number.0.3", std::string("three")}}));

  const auto sharded = inspect_checkpoint(folder("sharded"));
  ASSERT_EQ(sharded.tensors[0].name, "rows");
  ASSERT_EQ(sharded.tensors[0].pieces.size(), 2u);
  EXPECT_EQ(sharded.tensors[0].pieces[1].offsets, (std::vector<int64_t>{7, 0}));
  EXPECT_EQ(sharded.tensors[0].pieces[1].sizes, (std::vector<int64_t>{6, 6}));
  std::set<std::string> files;
  for (const auto& tensor : inspect_checkpoint(folder("overwritten")).tensors) {
    for (const auto& piece : tensor.pieces) {
      files.insert(piece.file);
    }
  }
  EXPECT_EQ(files, (std::set<std::string>{"__0_0.distcp", "__1_0.distcp"}));
  EXPECT_GT(detail::list_folder(folder("overwritten")).size(), 10u) << "older files stay there";
}

TEST_F(DcpFolders, HaveObjectsThatOnlyPythonReads) {
  const auto contents = inspect_checkpoint(folder("objects"));
  std::map<std::string, std::string> types;
  for (const auto& object : contents.objects) {
    types[object.name] = object.type;
    EXPECT_GT(object.bytes, 0);
  }
  const std::map<std::string, std::string> expected{
      {"bytes", "bytes"},         {"set", "set"},         {"huge", "int"},
      {"dtype", "torch.float32"}, {"keys", "tuple"},      {"tuple.0", "torch.Tensor"},
      {"size", "torch.Size"},     {"complex", "complex"}, {"surrogate", "str"},
      {"cycle", "tuple"},         {"doubled", "tuple"},   {"taken", "list"}};
  EXPECT_EQ(types, expected);
  using Values = decltype(contents.values);
  EXPECT_EQ(contents.values, (Values{{"tuple.1", int64_t{5}}, {"taken.0", int64_t{2}}}));
  EXPECT_TRUE(verify_checkpoint(folder("objects")).problems.empty());

  const auto out = temporary_folder() + "/out";
  const auto report = convert_checkpoint(folder("objects"), out);
  EXPECT_EQ(report.left_out.size(), expected.size());
  EXPECT_EQ(report.num_tensors, 1);
  EXPECT_EQ(inspect_checkpoint(out).values, contents.values);
  run_ranks(2, [&](int) {
    for (const auto* name : {"bytes", "keys.0"}) {
      auto state = state_with(name, int64_t{0});
      EXPECT_TRUE(contains(
          message_of<CheckpointError>([&] { load(state, folder("objects")); }),
          "which only Python can read"));
    }
  });
}

TEST_F(DcpFolders, AreConverted) {
  const auto out = temporary_folder();
  for (const auto* name : {"plain", "sharded", "sharded_strided"}) {
    SCOPED_TRACE(name);
    const auto full = out + "/full_" + name;
    const auto sharded = out + "/sharded_" + name;
    EXPECT_TRUE(convert_checkpoint(folder(name), full, {.max_file_bytes = 300}).left_out.empty());
    convert_checkpoint(
        folder(name), sharded, {.format = ConvertOptions::Format::sharded, .num_ranks = 3});
    for (const auto& path : {full, sharded}) {
      run_ranks(2, [&](int) {
        auto state = make_state(specs(), false);
        load(state, path);
        expect_values(state, specs());
      });
      const auto report = verify_checkpoint(path);
      EXPECT_TRUE(report.problems.empty()) << report.problems[0];
      EXPECT_EQ(inspect_checkpoint(path).values, inspect_checkpoint(folder(name)).values);
    }
    EXPECT_EQ(verify_checkpoint(sharded).unchecked_bytes, 0);
  }
  // Python's programs may still need it.
  const auto copy = copy_of("sharded");
  ConvertOptions in_place{.format = ConvertOptions::Format::sharded};
  in_place.overwrite = true;
  EXPECT_TRUE(contains(
      message_of<CheckpointError>([&] { convert_checkpoint(copy, copy, in_place); }),
      "holds '.metadata', which is not of a checkpoint"));
}

/// Where the data of the next tensor begin in a file, from `offset` on.
size_t data_after(const std::string& file, int64_t offset) {
  const std::string name = "archive/data/0";
  const auto at = file.find(name, static_cast<size_t>(offset));
  EXPECT_NE(at, std::string::npos);
  const auto padding = static_cast<unsigned char>(file[at - 2]); // before the name is its length
  return at + name.size() + padding;
}

TEST_F(DcpFolders, AFlippedBitIsFound) {
  const auto path = copy_of("sharded");
  const auto file = path + "/__1_0.distcp";
  const auto good = file_text(file);
  for (const auto& tensor : inspect_checkpoint(path).tensors) {
    for (const auto& piece : tensor.pieces) {
      if (piece.file != "__1_0.distcp") {
        continue;
      }
      auto bad = good;
      bad[data_after(good, piece.offset)] ^= 1;
      set_file_text(file, bad);
      const auto where = file + ", tensor '" + tensor.name + "': bytes ";
      EXPECT_TRUE(contains(problem_of(path), where));
      EXPECT_TRUE(contains(load_message(path), where));
      const auto out = temporary_folder() + "/out";
      EXPECT_TRUE(
          contains(message_of<CheckpointError>([&] { convert_checkpoint(path, out); }), where));
      EXPECT_FALSE(detail::path_exists(out));
      // Wrong metadata of a tensor are found even if nobody asks for checksums.
      bad = good;
      bad[good.find("_rebuild_tensor_v", static_cast<size_t>(piece.offset))] ^= 1;
      set_file_text(file, bad);
      EXPECT_TRUE(
          contains(problem_of(path), "tensor '" + tensor.name + "': the record 'data.pkl'"));
    }
  }
}

TEST_F(DcpFolders, WhatIsMissingIsFound) {
  const auto path = copy_of("sharded");
  const auto file = path + "/__1_0.distcp";
  const auto good = file_text(file);
  set_file_text(file, good.substr(0, good.size() - 1)); // in a chunk without elements
  EXPECT_TRUE(contains(problem_of(path), "the file is truncated"));
  EXPECT_TRUE(contains(load_message(path), "the file is truncated"));
  set_file_text(file, good.substr(0, 1000));
  const auto problems = verify_checkpoint(path).problems;
  ASSERT_GT(problems.size(), 5u);
  EXPECT_TRUE(contains(problems[1], file + ", tensor '"));
  EXPECT_TRUE(contains(problems[1], "the file is truncated"));
  EXPECT_TRUE(contains(load_message(path), "the file is truncated"));
  unlink(file.c_str());
  EXPECT_TRUE(contains(problem_of(path), file));
  EXPECT_TRUE(contains(load_message(path), file));
  set_file_text(file, file_text(path + "/__0_0.distcp"));
  EXPECT_FALSE(verify_checkpoint(path).problems.empty()) << "a file of another rank";
  EXPECT_FALSE(load_message(path).empty());
  set_file_text(file, good);

  const auto metadata = path + "/.metadata";
  const auto good_metadata = file_text(metadata);
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{100}, good_metadata.size() - 1}) {
    set_file_text(metadata, good_metadata.substr(0, bytes));
    EXPECT_TRUE(contains(problem_of(path), metadata + ": the pickle is damaged"));
    EXPECT_TRUE(contains(load_message(path), metadata + ": the pickle is damaged"));
  }
  unlink(metadata.c_str());
  EXPECT_TRUE(contains(problem_of(path), " is incomplete: .metadata is missing"));
  EXPECT_TRUE(contains(load_message(path), " is incomplete: .metadata is missing"));
}

TEST_F(DcpFolders, OfOtherFormatsAreRefused) {
  for (const auto& [name, words] :
       {std::pair("rot13", "is stored compressed or otherwise transformed ('stream.rot13/1')"),
        std::pair("safetensors", "or the files are not in the format of torch.save"),
        std::pair("without_collectives", "its ranks were saved without collectives")}) {
    SCOPED_TRACE(name);
    EXPECT_TRUE(contains(problem_of(folder(name)), words));
    EXPECT_TRUE(contains(load_message(folder(name)), words));
    EXPECT_TRUE(
        contains(message_of<CheckpointError>([&] { inspect_checkpoint(folder(name)); }), words));
  }
}

TEST_F(DcpFolders, NothingInThemRuns) {
  const auto contents = inspect_checkpoint(folder("hostile"));
  ASSERT_EQ(contents.objects.size(), 1u);
  EXPECT_EQ(contents.objects[0].name, "evil");
  EXPECT_EQ(contents.objects[0].type, "posix.system");
  EXPECT_TRUE(verify_checkpoint(folder("hostile")).problems.empty());
  run_ranks(1, [&](int) {
    auto state = state_with("step", int64_t{0});
    load(state, folder("hostile"));
    EXPECT_EQ(std::get<int64_t>(state.at("step")), 3);
  });
  const auto path = copy_of("hostile");
  set_file_text(path + "/.metadata", file_text(folder("hostile.metadata")));
  EXPECT_TRUE(contains(problem_of(path), "/.metadata: 'storage_data' is missing"));
  EXPECT_TRUE(contains(load_message(path), "/.metadata: 'storage_data' is missing"));
  EXPECT_FALSE(detail::path_exists(folder("ran")));
}

struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl()
      : first(register_module("0", linear(5, 7))), second(register_module("1", linear(7, 3))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return second(first(x));
  }
  Linear first;
  Linear second;
};
FSDP_MODULE(TwoLayers);

TEST_F(DcpFolders, AModelAndItsOptimizerGoOn) {
  run_ranks(3, [&](int) {
    TwoLayers net;
    fully_shard(net->first);
    fully_shard(net->second);
    fully_shard(net);
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.5));
    const auto state_now = [&] {
      StateDict state;
      state.insert_all(get_model_state_dict(*net), "model.");
      state.insert_all(get_optimizer_state_dict(*net, optimizer), "optim.");
      return state;
    };
    auto state = state_now();
    load(state, folder("fsdp2"));
    set_optimizer_state_dict(*net, optimizer, state.below("optim."));
    state = state_now();
    int num_tensors = 0;
    for (const auto& [key, value] : state) {
      if (value.index() > 1) {
        continue; // no tensor
      }
      ++num_tensors;
      auto expected = state_with(key, torch::zeros(whole(value).sizes()));
      load(expected, folder("fsdp2.safetensors"));
      EXPECT_SAME(whole(value), std::get<at::Tensor>(expected.at(key))) << key;
    }
    EXPECT_EQ(num_tensors, 12);
    for (const auto* name : {"0.weight", "0.bias", "1.weight", "1.bias"}) {
      const auto in_state = c10::str("optim.state.", name, ".step");
      const auto in_group = c10::str("optim.param_groups.", name);
      EXPECT_EQ(std::get<int64_t>(state.at(in_state)), 2);
      EXPECT_EQ(std::get<double>(state.at(in_group + ".lr")), 0.125);
      EXPECT_EQ(std::get<double>(state.at(in_group + ".betas.1")), 0.75);
    }
  });
}

} // namespace
} // namespace fsdp
