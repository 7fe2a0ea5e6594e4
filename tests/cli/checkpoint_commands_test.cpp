// `fsdp inspect`, `fsdp verify` and `fsdp convert`, from outside.
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "checkpoint/checkpoints.h"
#include "checkpoint/name_rules.h"
#include "cli/tool.h"
#include "fuzz/dcp_inputs.h"

namespace fsdp::test {
namespace {

constexpr int64_t kSeed = 5;

/// A checkpoint of four ranks.
std::string saved() {
  const auto path = temporary_folder() + "/checkpoint";
  save_samples(4, path, kSeed);
  return path;
}

nlohmann::json inspected(const std::string& path) {
  const auto ended = run({"inspect", path, "--json"});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  return nlohmann::json::parse(ended.output);
}

void expect_good(const std::string& path) {
  const auto ended = run({"verify", path});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(contains(ended.output, "\ngood "));
}

std::string converted(const std::vector<std::string>& words) {
  auto all = words;
  all.insert(all.begin(), "convert");
  const auto ended = run(all);
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  return ended.output;
}

TEST(Inspect, ListsTensorsAndValues) {
  const auto path = saved();
  const auto ended = run({"inspect", path});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  for (const auto* part :
       {"format    fsdp, saved 20", "\nTENSOR ", " DTYPE ", " CRC32C\n", "\nrows ", " [13,6] ",
        " BF16 ", "rank_00000.safetensors +3 ", "\nstep   5\n", "\ntotal     12 tensors, ",
        " files; 1 value\n"}) {
    EXPECT_TRUE(contains(ended.output, part));
  }
  EXPECT_EQ(count(ended.output, "\x1b"), 0); // not a terminal
  EXPECT_EQ(count(ended.output, " \n"), 0);  // no blanks at the ends
}

TEST(Inspect, AsJson) {
  const auto path = saved();
  const auto json = inspected(path);
  EXPECT_EQ(json["format"], "fsdp");
  EXPECT_EQ(json["values"]["step"], kSeed);
  ASSERT_EQ(json["tensors"].size(), samples_1d().size());
  int64_t bytes = 0;
  for (size_t i = 0; i < samples_1d().size(); ++i) { // in the order of the state dict
    const auto sample = samples_1d()[i];
    const auto& tensor = json["tensors"][i];
    EXPECT_EQ(tensor["name"], sample.key);
    EXPECT_EQ(tensor["shape"], nlohmann::json(sample.sizes));
    bytes += tensor["bytes"].get<int64_t>();
    for (const auto& piece : tensor["pieces"]) {
      EXPECT_EQ(piece["crc32c"].empty(), tensor["bytes"] == 0) << sample.key;
    }
  }
  EXPECT_EQ(json["bytes"], bytes);
}

TEST(Inspect, OfASeriesTheLatest) {
  const auto root = temporary_folder() + "/run/checkpoints";
  CheckpointSeries series(root);
  StateDict state;
  state.insert("w", torch::ones({3}));
  series.save(1, state);
  series.save(2, state);
  for (const auto* folder : {"", "/.."}) { // the run's folder will do
    EXPECT_TRUE(contains(inspected(root + folder)["path"].get<std::string>(), "/step_00000002"));
  }
  const auto read = converted({root + "/..", root + "/../../hf"});
  EXPECT_TRUE(contains(read, "read      "));
  EXPECT_TRUE(contains(read, "/checkpoints/step_00000002\n"));
  const auto above = run({"inspect", root + "/step_00000002/../../../run/.."});
  EXPECT_EQ(above.exit_code, 4);
  EXPECT_TRUE(contains(above.output, " holds no checkpoint: neither "));
  const auto other = temporary_folder();
  CheckpointSeries(other + "/mine").save(1, state);
  const auto close = run({"inspect", other});
  EXPECT_EQ(close.exit_code, 4);
  EXPECT_TRUE(contains(close.output, "did you mean " + other + "/mine?"));
  // The latest is damaged: not to be passed over for an older one.
  set_file_text(root + "/step_00000002/rank_00000.safetensors", "short");
  EXPECT_EQ(run({"verify", root}).exit_code, 1);
}

TEST(Inspect, RefusesWhatIsNoCheckpoint) {
  const auto folder = temporary_folder();
  for (const auto* command : {"inspect", "verify"}) {
    SCOPED_TRACE(command);
    const auto missing = run({command, folder + "/none"});
    EXPECT_EQ(missing.exit_code, 4);
    EXPECT_TRUE(contains(missing.output, "/none: there is no such checkpoint\n"));
    const auto empty = run({command, folder});
    EXPECT_EQ(empty.exit_code, 4);
    EXPECT_TRUE(
        contains(empty.output, " holds no checkpoint: neither manifest.json nor .metadata nor a "));
    const auto here = run_script(c10::str("cd ", folder, " && ", kTool, " ", command, " ."));
    EXPECT_EQ(here.exit_code, 4);
    EXPECT_TRUE(
        contains(here.output, ". holds no checkpoint: neither manifest.json nor .metadata nor a "));
    EXPECT_TRUE(contains(here.output, "; give the folder of a run, of a checkpoint or "));
  }
}

TEST(Inspect, TakesTheFolderThatItIsIn) {
  const auto root = temporary_folder();
  StateDict state;
  state.insert("w", torch::ones({3}));
  CheckpointSeries(root).save(7, state);
  for (const auto* folder : {"", "/step_00000007"}) {
    SCOPED_TRACE(folder);
    const auto here = run_script(c10::str("cd ", root, folder, " && ", kTool, " inspect ."));
    EXPECT_EQ(here.exit_code, 0) << here.output;
    EXPECT_TRUE(contains(here.output, "\ntotal     1 tensor, "));
  }
  ASSERT_EQ(unlink((root + "/latest").c_str()), 0); // by the folders' names then
  EXPECT_EQ(run_script(c10::str("cd ", root, " && ", kTool, " verify .")).exit_code, 0);
}

TEST(Verify, FindsAFlippedBit) {
  const auto path = saved();
  expect_good(path);
  for (const auto& tensor : inspected(path)["tensors"]) {
    if (tensor["bytes"] == 0) {
      continue;
    }
    const auto piece = tensor["pieces"].back();
    const auto name = piece["file"].get<std::string>();
    const auto file = path + "/" + name;
    const auto good = file_text(file);
    auto bad = good;
    bad[piece["offset"].get<size_t>()] ^= 4;
    set_file_text(file, bad);
    const auto ended = run({"verify", path});
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_TRUE(contains(
        ended.output, name + ", tensor '" + tensor["name"].get<std::string>() + "': bytes "));
    EXPECT_TRUE(contains(ended.output, "\nresult    1 problem; "));
    set_file_text(file, good);
  }
}

TEST(Verify, FindsWhatElseIsWrong) {
  const auto path = saved();
  const auto file = path + "/rank_00002.safetensors";
  const auto good = file_text(file);
  const auto expect_bad = [&](const std::vector<std::string>& parts) {
    const auto ended = run({"verify", path});
    EXPECT_EQ(ended.exit_code, 1);
    for (const auto& part : parts) {
      EXPECT_TRUE(contains(ended.output, part));
    }
  };
  set_file_text(file, good.substr(0, good.size() - 1));
  expect_bad({"bad       " + file + ", tensor '", "the file is truncated"});
  auto other_header = good; // as good as the right one, and Python would go by it
  const auto at = other_header.find("\"shape\":[4,6]");
  ASSERT_NE(at, std::string::npos);
  other_header.replace(at, 13, "\"shape\":[6,4]");
  set_file_text(file, other_header);
  expect_bad({file + ", tensor 'rows': the file's header says otherwise than the manifest"});
  unlink(file.c_str());
  expect_bad({file});
  set_file_text(file, good);
  set_file_text(path + "/stray.safetensors", good);
  expect_bad({"/stray.safetensors: is not in the manifest"});
  unlink((path + "/stray.safetensors").c_str());
  auto manifest = file_text(path + "/manifest.json");
  manifest[manifest.size() / 2] ^= 1;
  set_file_text(path + "/manifest.json", manifest);
  expect_bad({"/manifest.json: is damaged"});
}

TEST(Verify, SaysThatFilesOfOthersHaveNoChecksums) {
  const auto path = saved();
  converted({path, path + "_hf"});
  const auto ended = run({"verify", path + "_hf"});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(contains(ended.output, "\nnote "));
  EXPECT_TRUE(contains(ended.output, "have no checksums"));
  const auto file = path + "_hf/model.safetensors";
  const auto text = file_text(file);
  set_file_text(file, text.substr(0, text.size() - 1));
  const auto cut = run({"verify", path + "_hf"});
  EXPECT_EQ(cut.exit_code, 1);
  EXPECT_TRUE(contains(cut.output, "/model.safetensors, tensor '"));
  EXPECT_TRUE(contains(cut.output, "\nresult    1 problem; "));
}

void expect_samples(const std::string& path) {
  run_ranks(3, [&](int) {
    auto state = make_state(samples_1d(), world_mesh(), 0);
    load(state, path);
    expect_state(state, samples_1d(), kSeed);
  });
}

TEST(Convert, ToFullAndBackBitForBit) {
  const auto path = saved();
  converted({path, path + "_one"});
  EXPECT_EQ(detail::list_folder(path + "_one"), (std::vector<std::string>{"model.safetensors"}));
  converted({path, path + "_many", "--files-of", "200B"});
  EXPECT_GT(detail::list_folder(path + "_many").size(), 3u);
  converted({path + "_many", path + "_back", "--format", "sharded", "--ranks", "3"});
  EXPECT_EQ(detail::list_folder(path + "_back").size(), 4u);
  converted({path, path + "_other", "--format", "sharded"});
  for (const auto* end : {"_one", "_one/model.safetensors", "_many", "_back", "_other"}) {
    SCOPED_TRACE(end);
    expect_good(path + end);
    expect_samples(path + end);
  }
  EXPECT_TRUE(leftovers(path.substr(0, path.rfind('/'))).empty());
}

TEST(Inspect, OneLongNameDoesNotWidenAllRows) {
  const auto path = temporary_folder() + "/checkpoint";
  StateDict state;
  state.insert(std::string(10'000, 'n'), torch::ones({1}));
  for (int64_t i = 0; i < 1000; ++i) {
    state.insert(c10::str("name", i), torch::ones({1}));
  }
  save(state, path);
  const auto ended = run({"inspect", path});
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_LT(ended.output.size(), 400'000u);
  // Following one way after another would overflow the stack.
  const auto renamed = run({"convert", path, path + "_out", "--rename", "(.*)=$1"});
  EXPECT_EQ(renamed.exit_code, 0) << renamed.output;
}

TEST(Convert, ChangesDtypesAndNames) {
  const auto path = saved();
  converted(
      {path, path + "_bf16", "--dtype", "bf16", "--only", "rows|cols|plain|few", "--rename",
       "(r|c)(ow|ol)s=$1.$2", "--rename", "few=less"});
  const auto json = inspected(path + "_bf16");
  std::map<std::string, std::string> dtypes;
  for (const auto& tensor : json["tensors"]) {
    dtypes[tensor["name"]] = tensor["dtype"];
  }
  const std::map<std::string, std::string> expected{
      {"r.ow", "BF16"}, {"c.ol", "BF16"}, {"plain", "I64"}, {"less", "BF16"}};
  EXPECT_EQ(dtypes, expected);
  StateDict state;
  state.insert("r.ow", torch::zeros({13, 6}, torch::kBFloat16));
  load(state, path + "_bf16");
  EXPECT_SAME(
      std::get<at::Tensor>(state.at("r.ow")),
      sample_values(samples_1d()[0], kSeed).to(torch::kBFloat16));
}

TEST(Convert, ARuleThatCouldMatchInManyWaysEnds) {
  // Tried one way after another, this takes forever, or exhausts the stack.
  const auto rename = detail::renaming_by({{"(([a-z]*)*)*=", "none"}, {"([a-z]+)*\\.(.*)", "$2"}});
  const std::string name(10'000, 'a');
  EXPECT_EQ(rename(name), name);
  EXPECT_EQ(rename(name + ".weight"), "weight");
}

TEST(Convert, RefusesWhatMakesNoSense) {
  const auto path = saved();
  const auto refused = [&](std::vector<std::string> more, const std::string& part, int code = 2) {
    more.insert(more.begin(), {"convert", path});
    const auto ended = run(more);
    EXPECT_EQ(ended.exit_code, code) << ended.output;
    EXPECT_TRUE(contains(ended.output, part));
  };
  const auto out = path + "_out";
  refused({out, "--ranks", "2"}, "--ranks 2: only valid with --format sharded");
  refused(
      {out, "--format", "sharded", "--files-of", "1GB"},
      "--files-of: only valid with --format full");
  refused({out, "--rename", "rows"}, "--rename 'rows': it must be FROM=TO");
  refused({out, "--rename", "(=x"}, "is no regular expression");
  refused({out, "--only", "(r)\\1"}, "'(r)\\1' refers back to a group");
  refused({out, "--only", std::string(1001, 'r')}, "and has 1001 characters; a regular expression");
  refused({out, "--rename", "r.*|c.*=same_name"}, "two names become 'same_name'");
  refused({out, "--only", "nobody"}, "no tensor has a name that ");
  refused({out + ".safetensors"}, "choose a name without .safetensors");
  EXPECT_FALSE(detail::path_exists(out));
  refused({path, "--format", "sharded"}, "exists already", 4);
  refused({path, "--overwrite"}, "would lose its manifest and checksums; write to another", 4);
  refused(
      {path + "/.", "--format", "sharded", "--only", "rows|step", "--overwrite"},
      "would be replaced by a part of itself", 4);
  converted({path, path, "--format", "sharded", "--overwrite"}); // in place
  expect_samples(path);
  converted({path, path + "_many", "--files-of", "200B"});
  const auto one_file = path + "_many/" + detail::list_folder(path + "_many")[1];
  const auto ended = run({"convert", one_file, path + "_many", "--overwrite"});
  EXPECT_EQ(ended.exit_code, 4) << ended.output;
  EXPECT_TRUE(contains(ended.output, "alone, which is one of its files; write to another folder"));
  expect_samples(path + "_many");
  // What is damaged is not carried on.
  const auto piece = inspected(path)["tensors"][0]["pieces"][0];
  auto text = file_text(path + "/rank_00000.safetensors");
  text[piece["offset"].get<size_t>()] ^= 1;
  set_file_text(path + "/rank_00000.safetensors", text);
  refused({out}, "tensor 'rows': bytes ", 4);
  EXPECT_FALSE(detail::path_exists(out));
}

/// A folder of torch.distributed.checkpoint: the tensor "w", and the object "o", a list of 5 and of
/// what only Python can read.
std::string dcp_folder() {
  const auto path = temporary_folder() + "/dcp";
  detail::make_folder(path);
  const auto object =
      object_archive(Pickled::list({Pickled::integer(5),
                                    Pickled::object(Pickled::global("__builtin__", "complex"), {})})
                         .bytes());
  auto dcp = good_dcp();
  dcp.object_length = static_cast<int64_t>(object.size());
  set_file_text(path + "/.metadata", dcp.bytes());
  set_file_text(path + "/0.distcp", kGoodTensorArchive);
  set_file_text(path + "/1.distcp", kGoodTensorArchive);
  set_file_text(path + "/2.distcp", object);
  return path;
}

TEST(DcpFolder, IsInspected) {
  const auto path = dcp_folder();
  const auto ended = run({"inspect", path});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  for (const auto* part :
       {"format    torch.distributed.checkpoint\n", "\nw       F32    [4,3] ", " 0.distcp +1 ",
        "\no.0    5\n", "\nOBJECT  TYPE ", "\no.1     complex ",
        "\ntotal     1 tensor, 48 B in 2 files; 1 value; 1 object of Python\n"}) {
    EXPECT_TRUE(contains(ended.output, part));
  }
  const auto json = inspected(path);
  EXPECT_EQ(json["format"], "torch.distributed.checkpoint");
  EXPECT_EQ(json["values"]["o.0"], 5);
  ASSERT_EQ(json["objects"].size(), 1u);
  EXPECT_EQ(json["objects"][0]["name"], "o.1");
  EXPECT_EQ(json["objects"][0]["type"], "complex");
  EXPECT_EQ(json["tensors"][0]["pieces"].size(), 2u);
}

TEST(DcpFolder, IsVerified) {
  const auto path = dcp_folder();
  expect_good(path);
  set_file_text(path + "/1.distcp", kGoodTensorArchive.substr(0, 100));
  const auto cut = run({"verify", path});
  EXPECT_EQ(cut.exit_code, 1);
  EXPECT_TRUE(contains(cut.output, "bad       " + path + "/1.distcp"));
  EXPECT_TRUE(contains(cut.output, "/1.distcp, tensor 'w': "));
  ASSERT_EQ(unlink((path + "/.metadata").c_str()), 0);
  const auto incomplete = run({"verify", path});
  EXPECT_EQ(incomplete.exit_code, 1);
  EXPECT_TRUE(contains(incomplete.output, path + " is incomplete: .metadata is missing"));
  EXPECT_EQ(run({"inspect", path}).exit_code, 4);
}

TEST(DcpFolder, IsConverted) {
  const auto path = dcp_folder();
  const auto words = converted({path, path + "_out", "--format", "sharded", "--ranks", "2"});
  EXPECT_TRUE(contains(words, "fsdp: warning: left out 1 object that only Python can read: o.1\n"));
  EXPECT_TRUE(contains(words, "_out: 1 tensor, 48 B in 2 files\n"));
  expect_good(path + "_out");
  EXPECT_EQ(inspected(path + "_out")["values"], nlohmann::json({{"o.0", 5}}));
  EXPECT_EQ(count(converted({path, path + "_w", "--only", "w"}), "left out"), 0);
  const auto in_place = run({"convert", path, path, "--format", "sharded", "--overwrite"});
  EXPECT_EQ(in_place.exit_code, 4);
  EXPECT_TRUE(contains(in_place.output, "save to another folder"));
}

} // namespace
} // namespace fsdp::test
