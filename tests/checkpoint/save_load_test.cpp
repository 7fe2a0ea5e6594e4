#include <fsdp/checkpoint.h>
#include <fsdp/checkpoint_tools.h>

#include <gtest/gtest.h>

#include "checkpoint/numbered.h"
#include "checkpoint/safetensors.h"

namespace fsdp {
namespace {

using namespace test;

class RoundTrip : public testing::TestWithParam<int> {};

TEST_P(RoundTrip, ToAnyNumberOfRanksAndPlacements) {
  const auto path = temporary_folder() + "/checkpoint";
  save_samples(GetParam(), path, 5);
  for (const int ranks : {1, 2, 3, 4, 8}) {
    run_ranks(ranks, [&](int) {
      for (const auto& samples : {samples_1d(), resharded(samples_1d())}) {
        SCOPED_TRACE(to_string(samples.front().placements));
        auto state = make_state(samples, world_mesh(), 0);
        load(state, path);
        expect_state(state, samples, 5);
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, RoundTrip, testing::Values(1, 2, 3, 4, 8));

std::vector<Sample> samples_2d() {
  return {
      {"both_dims", {6, 10}, at::kFloat, {Shard{0}, Shard{1}}},
      {"one_dim_twice", {7, 3}, at::kFloat, {Shard{0}, Shard{0}}},
      {"fsdp_over_tp", {10, 4}, at::kBFloat16, {StridedShard{0, 2}, Shard{0}}},
      {"hsdp", {9, 2}, at::kFloat, {Replicate{}, Shard{0}}},
      {"replicas_last", {9, 2}, at::kFloat, {Shard{1}, Replicate{}}},
      {"same", {5}, at::kFloat, {Replicate{}, Replicate{}}},
      {"plain", {3}, at::kLong}};
}

TEST(SaveLoad, BetweenOneAndTwoDims) {
  const auto folder = temporary_folder();
  auto samples_one = samples_2d();
  for (auto& sample : samples_one) {
    if (!sample.placements.empty()) {
      sample.placements = {Shard{0}};
    }
  }
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2});
    save(make_state(samples_2d(), mesh, 3), folder + "/two");
    auto state = make_state(samples_2d(), mesh, 0);
    load(state, folder + "/two");
    expect_state(state, samples_2d(), 3);
  });
  run_ranks(3, [&](int) {
    auto state = make_state(samples_one, world_mesh(), 0);
    load(state, folder + "/two");
    expect_state(state, samples_one, 3);
    save(state, folder + "/one");
  });
  run_ranks(8, [&](int) {
    auto state = make_state(samples_2d(), init_device_mesh(at::kCPU, {4, 2}), 0);
    load(state, folder + "/one");
    expect_state(state, samples_2d(), 3);
  });
}

int64_t stored_bytes(const std::string& folder) {
  int64_t bytes = 0;
  for (const auto& name : detail::list_folder(folder)) {
    if (name.find(".safetensors") != std::string::npos) {
      const auto file = detail::File::open(folder + "/" + name);
      for (const auto& entry : detail::read_safetensors(file).entries) {
        bytes += entry.bytes();
      }
    }
  }
  return bytes;
}

TEST(SaveLoad, EveryByteIsWrittenOnceAndByAllRanks) {
  const auto path = temporary_folder() + "/checkpoint";
  int64_t expected = 0;
  for (const auto& sample : samples_2d()) {
    expected += static_cast<int64_t>(sample_values(sample, 0).nbytes());
  }
  run_ranks(
      4, [&](int) { save(make_state(samples_2d(), init_device_mesh(at::kCPU, {2, 2}), 1), path); });
  EXPECT_EQ(stored_bytes(path), expected);
  EXPECT_EQ(
      detail::list_folder(path),
      (std::vector<std::string>{
          "manifest.json", "rank_00000.safetensors", "rank_00001.safetensors",
          "rank_00002.safetensors", "rank_00003.safetensors"}));
  EXPECT_TRUE(leftovers(path + "/..").empty());
}

TEST(SaveLoad, ReplicasShareTheWork) {
  const auto path = temporary_folder() + "/checkpoint";
  std::vector<Sample> samples; // weights and biases by turns
  for (int i = 0; i < 8; ++i) {
    const auto layer = std::to_string(i);
    samples.push_back({"w" + layer, {32, 8}, at::kFloat, {Replicate{}, Shard{0}}});
    samples.push_back({"b" + layer, {8}, at::kFloat, {Replicate{}, Shard{0}}});
  }
  run_ranks(
      4, [&](int) { save(make_state(samples, init_device_mesh(at::kCPU, {2, 2}), 1), path); });
  std::map<std::string, int64_t> bytes;
  for (const auto& tensor : detail::open_catalog(path).tensors) {
    for (const auto& piece : tensor.pieces) {
      bytes[piece.file] += piece.box.numel() * 4;
    }
  }
  ASSERT_EQ(bytes.size(), 4u);
  for (const auto& [file, count] : bytes) {
    EXPECT_EQ(count, 4 * (32 * 8 + 8) * 4 / 2) << file; // half of four layers
  }
}

TEST(SaveLoad, TensorsOnASliceOfAMeshAreWrittenOnce) {
  const auto path = temporary_folder() + "/checkpoint";
  const std::vector<Sample> samples{{"w", {8, 2}, at::kFloat, {Shard{0}}}};
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    save(make_state(samples, mesh["tp"], 2), path);
    auto state = make_state(samples, mesh["dp"], 0);
    load(state, path);
    expect_state(state, samples, 2);
  });
  EXPECT_EQ(stored_bytes(path), 8 * 2 * 4);
}

TEST(SaveLoad, HeadersAloneDescribeTheShards) {
  // As torch's distributed checkpoint reads it, which knows no manifest.
  const auto path = temporary_folder() + "/checkpoint";
  save_samples(3, path, 5);
  ASSERT_EQ(std::remove((path + "/manifest.json").c_str()), 0);
  for (const auto& name : detail::list_folder(path)) { // under our names they are incomplete
    detail::rename_path(path + "/" + name, path + "/shard_" + name);
  }
  run_ranks(2, [&](int) {
    const auto samples = samples_1d();
    auto state = make_state(samples, world_mesh(), 5);
    for (const auto& sample : samples) {
      torch::NoGradGuard no_grad;
      auto& value = state.at(sample.key);
      auto* spread = std::get_if<DTensor>(&value);
      auto local = spread ? spread->to_local() : std::get<at::Tensor>(value);
      local.zero_();
    }
    load(state, path, {.strict = false}); // values are in the manifest only
    expect_state(state, samples, 5);
  });
}

// However many experts a rank has: the first and the last one in part, and those between.
TEST(SaveLoad, BlocksOfManyExpertsAreAFewPieces) {
  const auto path = temporary_folder() + "/saved";
  const std::vector<Sample> samples{
      {"experts", {40, 5, 3}, at::kFloat, {BlockShard{2}}},
      {"kernels", {7, 6, 5, 2}, at::kFloat, {BlockShard{3}}}};
  run_ranks(3, [&](int) { save(make_state(samples, world_mesh(), 1), path); });
  int num_files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    num_files += entry.path().extension() == ".safetensors" ? 1 : 0;
  }
  EXPECT_LE(num_files, 3 * 5);
  run_ranks(2, [&](int) {
    auto state = make_state(samples, world_mesh(), -1);
    load(state, path);
    expect_state(state, samples, 1);
  });
}

TEST(SaveLoad, RanksMayBringDifferentKeys) {
  const auto path = temporary_folder() + "/checkpoint";
  run_ranks(3, [&](int rank) {
    auto state = state_with("rank." + std::to_string(rank), torch::full({2}, rank));
    if (rank == 1) {
      state.insert("of_one", int64_t{7});
    }
    if (rank > 0) {
      state.insert("of_two", torch::ones({3}));
    }
    save(state, path);
  });
  StateDict state;
  for (const auto* key : {"rank.0", "rank.1", "rank.2"}) {
    state.insert(key, torch::full({2}, int64_t{9}));
  }
  state.insert("of_one", int64_t{0});
  state.insert("of_two", torch::zeros({3}));
  load(state, path);
  EXPECT_SAME(std::get<at::Tensor>(state.at("rank.2")), torch::full({2}, int64_t{2}));
  EXPECT_SAME(std::get<at::Tensor>(state.at("of_two")), torch::ones({3}));
  EXPECT_EQ(std::get<int64_t>(state.at("of_one")), 7);
}

TEST(SaveLoad, WithoutAProcessGroupAndOfAllValues) {
  const auto path = temporary_folder() + "/a/b/checkpoint/"; // with folders above, and a slash
  auto state = state_with("t", torch::arange(6).view({2, 3}).t()); // not contiguous
  state.insert("yes", true);
  state.insert("int", int64_t{-5});
  state.insert("double", 0.1);
  state.insert("whole_double", 2.0);
  state.insert("nan", std::nan(""));
  state.insert("infinity", -INFINITY);
  state.insert("text", std::string("\"a\"\n\xc3\xa4"));
  save(state, path);
  StateDict read;
  for (const auto& [key, value] : state) {
    read.insert(key, key == "t" ? StateDict::Value(torch::zeros({3, 2}, torch::kLong)) : false);
  }
  load(read, path);
  EXPECT_SAME(std::get<at::Tensor>(read.at("t")), torch::arange(6).view({2, 3}).t().contiguous());
  for (const auto* key : {"yes", "int", "double", "whole_double", "infinity", "text"}) {
    EXPECT_EQ(read.at(key).index(), state.at(key).index()) << key;
  }
  EXPECT_EQ(std::get<double>(read.at("double")), 0.1);
  EXPECT_EQ(std::get<std::string>(read.at("text")), "\"a\"\n\xc3\xa4");
  EXPECT_TRUE(std::isnan(std::get<double>(read.at("nan"))));
}

TEST(SaveLoad, ConvertsToTheDtypeThatIsThere) {
  const auto path = temporary_folder() + "/checkpoint";
  auto state = state_with("w", torch::tensor({1.0F, 2.5F, -3.0F}));
  save(state, path);
  StateDict read;
  auto live = torch::zeros({3}, torch::kBFloat16).requires_grad_();
  read.insert("w", live);
  load(read, path);
  EXPECT_SAME(live.detach(), torch::tensor({1.0F, 2.5F, -3.0F}).to(torch::kBFloat16));
}

TEST(SaveLoad, LargeTensorsHaveSeveralChecksums) {
  const auto path = temporary_folder() + "/checkpoint";
  const auto big = torch::arange(3 * 1024 * 1024).view({1024, -1}); // 24 MiB
  run_ranks(2, [&](int) {
    auto state = state_with("w", distribute_tensor(big, world_mesh(), {Shard{0}}));
    save(state, path);
  });
  run_ranks(3, [&](int) {
    for (const int64_t dim : {0, 1}) {
      SCOPED_TRACE_OF(dim);
      auto state =
          state_with("w", distribute_tensor(torch::zeros_like(big), world_mesh(), {Shard{dim}}));
      load(state, path);
      EXPECT_SAME(whole(state.at("w")), big);
    }
  });
}

TEST(SaveLoad, NamesAreMapped) {
  const auto path = temporary_folder() + "/checkpoint";
  auto state = state_with("model.layers.3.wq", torch::ones({2}));
  save(state, path);
  auto read = state_with("blocks.3.q", torch::zeros({2}));
  load(read, path, {.names = {{R"(blocks\.(\d+)\.q)", "model.layers.$1.wq"}}});
  EXPECT_SAME(std::get<at::Tensor>(read.at("blocks.3.q")), torch::ones({2}));
}

TEST(SaveHf, RoundTrip) {
  const auto folder = temporary_folder();
  const std::vector<Sample> samples{
      {"layers.0.w", {6, 10}, at::kFloat, {Shard{1}}},
      {"layers.1.w", {7, 3}, at::kFloat, {StridedShard{0, 2}}},
      {"bias", {5}, at::kFloat, {Replicate{}}},
      {"flags", {3}, at::kBool, {Shard{0}}}};
  const std::vector<NameRule> names{{R"(layers\.(\d)\.w)", "model.$1.weight"}};
  run_ranks(3, [&](int) {
    const auto state = make_state(samples, world_mesh(), 4);
    save_hf(state, folder + "/one", {.names = names});
    save_hf(
        state, folder + "/many", {.max_file_bytes = 130, .names = names, .dtype = at::kBFloat16});
  });
  EXPECT_EQ(detail::list_folder(folder + "/one"), (std::vector<std::string>{"model.safetensors"}));
  const auto many = detail::list_folder(folder + "/many");
  ASSERT_EQ(many.size(), 3u);
  EXPECT_EQ(many[0], "model-00001-of-00002.safetensors");
  EXPECT_EQ(many[2], "model.safetensors.index.json");
  EXPECT_EQ(detail::open_catalog(folder + "/many").find_tensor("bias")->dtype, at::kBFloat16);
  EXPECT_EQ(detail::open_catalog(folder + "/many").find_tensor("flags")->dtype, at::kBool);
  for (const auto* name : {"/one", "/many", "/one/model.safetensors"}) {
    run_ranks(2, [&](int) {
      SCOPED_TRACE(name);
      auto state = make_state(samples, world_mesh(), 0);
      state.set("step", int64_t{4}); // there is no place for it in these files
      load(state, folder + name, {.strict = false, .names = names});
      expect_state(state, samples, 4);
    });
  }
}

TEST(Convert, TensorsMayBeChangedOnTheWay) {
  const auto folder = temporary_folder();
  run_ranks(1, [&](int) { save(numbered(3), folder + "/in"); });
  const auto convert = [&](auto change, ConvertOptions::Format format) {
    convert_checkpoint(
        folder + "/in", folder + "/out",
        {.format = format, .dtype = torch::kDouble, .overwrite = true, .change = change});
  };
  const auto full = ConvertOptions::Format::full;
  convert([](const std::string&, const at::Tensor& w) { return w.to(torch::kFloat) * 0.5; }, full);
  auto state = state_with("w", torch::zeros({4}, torch::kLong));
  load(state, folder + "/out");
  EXPECT_SAME(std::get<at::Tensor>(state.at("w")), torch::full({4}, 1)); // in int64, as it was
  const auto cut = [](const std::string&, const at::Tensor& w) { return w.narrow(0, 0, 2); };
  EXPECT_TRUE(contains(
      message_of<CheckpointError>([&] { convert(cut, full); }), "a tensor of shape [2] of w"));
  EXPECT_TRUE(contains(
      message_of<c10::ValueError>([&] { convert(cut, ConvertOptions::Format::sharded); }),
      "the format must be full"));
}

} // namespace
} // namespace fsdp
