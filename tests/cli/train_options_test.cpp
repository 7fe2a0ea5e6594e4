// Options of `fsdp train`: files of them, and what is written down.
#include <fsdp/error.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cli/config/config_file.h"
#include "cli/config/mesh_option.h"
#include "cli/config/presets.h"
#include "cli/invocation.h"
#include "cli/nearest.h"
#include "cli/tiny_run.h"
#include "cli/train/curve.h"
#include "cli/train/plan.h"
#include "support/tensors.h"

namespace fsdp::test {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

std::string file_with(const std::string& name, const std::string& text) {
  const auto path = temporary_folder() + "/" + name;
  std::ofstream(path) << text;
  return path;
}

// ------------------------------------------------------------ Files

TEST(ConfigFile, JsonAndTomlSayTheSame) {
  const auto json = file_with(
      "a.json", R"({"steps": 3, "param_dtype": "bf16", "betas": [0.9, 0.99], "offload": true,
                    "model": {"dim": 64}, "mesh": {"dp": 2, "tp": 2}, "clip": null})");
  const auto toml = file_with(
      "a.toml",
      "steps = 3\nparam-dtype = \"bf16\"\nbetas = [0.9, 0.99]\noffload = true\n"
      "[model]\ndim = 64\n[mesh]\ndp = 2\ntp = 2\n");
  const Words expected{"--steps=3",      "--param-dtype=bf16", "--betas=0.9,0.99",
                       "--offload=true", "--dim=64",           "--mesh=dp=2,tp=2"};
  EXPECT_EQ(cli::config_words(json), expected);
  EXPECT_EQ(cli::config_words(toml), expected);
}

TEST(ConfigFile, TheCommandLineWins) {
  const auto file = file_with("a.json", R"({"steps": 4, "seed": 9, "ranks": 2})");
  const auto run_folder = temporary_folder() + "/run";
  const auto ended = run(tiny_options(
      text_file(), {"--steps", "5", "--config", file, "--run", run_folder, "--quiet"}));
  ASSERT_EQ(ended.exit_code, 0) << ended.output;
  const auto config = Json::parse(std::ifstream(run_folder + "/config.json"));
  EXPECT_EQ(config["steps"], 5);
  EXPECT_EQ(config["seed"], 9);
  EXPECT_EQ(config["mesh"], "shard=2");
  EXPECT_EQ(config["kv-heads"], 2);
  // What was decided is a file of options itself, and gives the same run.
  const auto again =
      run({"train", "--config", run_folder + "/config.json", "--run", run_folder + "2", "--quiet"});
  EXPECT_EQ(result_in(again.output), result_in(ended.output)) << again.output;
  const auto steps = metrics_of(run_folder);
  const auto others = metrics_of(run_folder + "2");
  ASSERT_EQ(steps.size(), 5u);
  ASSERT_EQ(others.size(), 5u);
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i]["step"], i + 1);
    EXPECT_EQ(steps[i]["loss"], others[i]["loss"]); // to the last bit
    EXPECT_GT(steps[i]["grad_norm"], 0);
    EXPECT_GT(steps[i]["memory"]["peak"], 0);
  }
}

TEST(ConfigFile, RefusesWhatItDoesNotKnow) {
  const auto unknown = run({"train", "--config", file_with("a.toml", "stepz = 3\n")});
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_TRUE(contains(unknown.output, "a.toml, line 1: train: there is no option --stepz; "));
  EXPECT_TRUE(contains(unknown.output, "did you mean --steps?"));
  const auto broken = run({"train", "--config", file_with("a.json", "{\"steps\": ")});
  EXPECT_EQ(broken.exit_code, 2);
  EXPECT_TRUE(contains(broken.output, "a.json is not JSON: "));
}

TEST(ConfigFile, AnEmptyValueTakesNoOtherOption) {
  const Words expected{"--run", "", "--steps=3"};
  EXPECT_EQ(cli::config_words(file_with("a.json", R"({"run": "", "steps": 3})")), expected);
  EXPECT_EQ(cli::config_words(file_with("a.toml", "run = \"\"\nsteps = 3\n")), expected);
  EXPECT_EQ(cli::expand_config({"--run=", "--steps", "3"}), (Words{"--run", "", "--steps", "3"}));
  const auto file = file_with("a.json", "{\"steps\": 3,\n\"data\": \"\",\n\"seed\": 8}");
  const auto ended = run({"train", "--config", file, "--dry-run"});
  EXPECT_EQ(ended.exit_code, 2) << ended.output;
  EXPECT_TRUE(contains(ended.output, file + ", line 2: --data: it has no value; give one, or "));
}

TEST(ConfigFile, RefusesWhatIsNoFileOfOptions) {
  const auto refusal = [](const std::string& path) {
    return message_of<ConfigError>([&] { cli::config_words(path); });
  };
  EXPECT_TRUE(contains(refusal(temporary_folder()), " is a folder, not a file"));
  EXPECT_TRUE(
      contains(refusal(file_with("a.json", "[\"steps\", 3]")), " is JSON, but not an object"));
  EXPECT_TRUE(contains(refusal(file_with("a.json", "3")), " is JSON, but not an object"));
  EXPECT_TRUE(contains(refusal(file_with("a.json", R"({"config": ""})")), "must not name another"));
  EXPECT_EQ(cli::config_words(file_with("a.toml", "[model]\ndim = 64\n")), Words{"--dim=64"});
}

TEST(ConfigFile, IsASmallFileOfText) {
  const auto refusal = [](const std::string& path) {
    return message_of<ConfigError>([&] { cli::config_words(path); });
  };
  EXPECT_TRUE(contains(refusal("/dev/zero"), "/dev/zero is a device or a pipe"));
  EXPECT_TRUE(contains(refusal(""), "it needs the name of a file"));
  EXPECT_TRUE(contains(refusal("/no/such/file"), "cannot be read: No such file"));
  const auto large = refusal(file_with("a.toml", std::string(2 << 20, ' ')));
  EXPECT_TRUE(contains(large, "has 2097152 bytes; a file of options has at most 1048576"));
  for (const auto* bytes :
       {"steps = 3\n\x7f"
        "ELF = 2\n",
        "steps = 3\ndata = \xff\xfe\n"}) {
    const auto message = refusal(file_with("a.toml", bytes));
    EXPECT_TRUE(contains(message, "a.toml, line 2 has bytes that are not text"));
    EXPECT_EQ(message.find_first_of("\x7f\xff"), std::string::npos);
  }
  const auto json = file_with("a.json", "\xEF\xBB\xBF{\"steps\": 3}");
  EXPECT_EQ(cli::config_words(json), Words{"--steps=3"});
  const auto toml = file_with("a.toml", "\xEF\xBB\xBFsteps = 3\n");
  EXPECT_EQ(cli::config_words(toml), Words{"--steps=3"});
}

TEST(ConfigFile, AMessageNamesTheLine) {
  const auto toml = file_with("a.toml", "# steps = 1\nsteps = 3\n\n[model]\nkv_heads = 0\n");
  const auto of_file = run({"train", "--dry-run", "--config", toml});
  EXPECT_EQ(of_file.exit_code, 2) << of_file.output;
  EXPECT_TRUE(contains(of_file.output, "fsdp: " + toml + ", line 5: --kv-heads 0: it must be 1"));
  const auto of_words = run({"train", "--dry-run", "--config", toml, "--kv-heads", "-1"});
  EXPECT_EQ(of_words.output, "fsdp: --kv-heads -1: it must be 1 or more\n");
  const auto json = file_with("a.json", "{\"seed\": 1,\n \"steps\": \"many\"}");
  const auto converted = run({"train", "--dry-run", "--config", json});
  EXPECT_EQ(converted.exit_code, 2) << converted.output;
  EXPECT_EQ(converted.output.find(json + ", line 2: Could not convert: --steps = "), 0u)
      << converted.output;
  const auto longest = file_with("a.toml", "seed = 1\nschedule = " + std::string(9000, 'x'));
  const auto cut = run({"train", "--dry-run", "--config", longest});
  EXPECT_EQ(cut.output.find(longest + ", line 2: --schedule: xxx"), 0u) << cut.output;
  EXPECT_LT(cut.output.size(), 2100u);
}

TEST(ConfigFile, WhatContradictsTheCommandLineIsLeftOut) {
  const auto json =
      file_with("a.json", R"({"mesh": "dp=2,shard=4", "quiet": true, "no-save": true, "dim": 64})");
  const auto toml =
      file_with("a.toml", "quiet = true\nno-save = true\ndim = 64\n[mesh]\ndp = 2\nshard = 4\n");
  for (const auto& file : {json, toml}) {
    SCOPED_TRACE(file);
    const auto with = [&](Words words) {
      words.insert(words.begin(), {"--config", file});
      auto result = cli::expand_config(words);
      std::sort(result.begin(), result.end());
      return result;
    };
    EXPECT_EQ(
        with({"--ranks=6"}),
        (Words{"--dim=64", "--mesh=dp=2", "--no-save=true", "--quiet=true", "--ranks=6"}));
    EXPECT_EQ(
        with({"--json", "--run=x"}),
        (Words{"--dim=64", "--json", "--mesh=dp=2,shard=4", "--run=x"}));
    EXPECT_EQ(
        with({"--json=false", "--model=small"}),
        (Words{
            "--json=false", "--mesh=dp=2,shard=4", "--model=small", "--no-save=true",
            "--quiet=true"}));
  }
  EXPECT_EQ(
      cli::expand_config({"--config", file_with("a.json", R"({"ranks": 2})"), "--mesh=shard=3"}),
      Words{"--mesh=shard=3"});
}

TEST(ConfigFile, ThatOfARunTrainsOnAnotherNumberOfRanks) {
  const auto run_folder = temporary_folder() + "/run";
  const auto first = run(
      tiny_options(text_file(), {"--steps", "2", "--ranks", "2", "--run", run_folder, "--quiet"}));
  ASSERT_EQ(first.exit_code, 0) << first.output;
  const auto ended = run(
      {"train", "--config", run_folder + "/config.json", "--ranks", "4", "--run", run_folder + "2",
       "--quiet"});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_EQ(Json::parse(std::ifstream(run_folder + "2/config.json"))["mesh"], "shard=4");
}

TEST(ConfigFile, AFlagThatIsOffContradictsNothing) {
  const auto file = file_with(
      "a.json", R"({"quiet": false, "json": true, "no-save": false, "run": "x", "save-every": 0})");
  const auto ended = run({"train", "--config", file, "--dry-run"});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_EQ(ended.output.find("{\"event\":\"plan\""), 0u) << ended.output;
}

// ------------------------------------------------------------ Small pieces

TEST(Nearest, FindsWhatWasMeant) {
  EXPECT_EQ(cli::nearest("--stepz", {"--seed", "--steps"}), "--steps");
  EXPECT_EQ(
      cli::nearest("--activation", {"--accumulate", "--activation-checkpointing"}),
      "--activation-checkpointing");
  EXPECT_EQ(cli::nearest("--xylophone", {"--seed", "--steps"}), "");
}

TEST(Invocation, WordsAreQuotedWhereAShellNeedsIt) {
  EXPECT_EQ(cli::quoted("runs/20261115-185244"), "runs/20261115-185244");
  EXPECT_EQ(cli::quoted("my runs/1"), "'my runs/1'");
  EXPECT_EQ(cli::quoted("it's"), "'it'\\''s'");
  EXPECT_EQ(cli::quoted(""), "''");
}

TEST(MeshOption, ShardTakesTheRest) {
  EXPECT_EQ(cli::parse_mesh("", 4), (cli::MeshShape{.shard = 4}));
  EXPECT_EQ(cli::parse_mesh("tp=2", 8), (cli::MeshShape{.shard = 4, .tensor = 2}));
  EXPECT_EQ(
      cli::parse_mesh("replicate=2,shard=3", {}), (cli::MeshShape{.replicate = 2, .shard = 3}));
  EXPECT_EQ(cli::parse_mesh("dp=2,shard=2,tp=2", 8).str(), "dp=2,shard=2,tp=2");
}

TEST(MeshOption, HasBounds) {
  const auto refusal = [](const std::string& text, std::optional<int64_t> ranks) {
    return message_of<ConfigError>([&] { cli::parse_mesh(text, ranks); });
  };
  EXPECT_TRUE(contains(refusal("shard=9999999999", {}), "1 or more, and 1048576 at most"));
  EXPECT_TRUE(contains(refusal("dp=1048576,shard=1048576", {}), "ranks are too many"));
  EXPECT_TRUE(contains(refusal("", 2'000'000), "--ranks: 2000000 ranks are too many"));
}

TEST(Presets, HaveTheSizesOfTheirNames) {
  const auto params = [](const std::string& name) {
    cli::TrainConfig config;
    config.model = cli::model_preset(name);
    return static_cast<double>(cli::make_plan(config, {}).num_params);
  };
  EXPECT_NEAR(params("tiny"), 804e3, 1e3);
  EXPECT_NEAR(params("1b"), 1.236e9, 2e6);
  EXPECT_NEAR(params("3b"), 3.21e9, 1e7);
  EXPECT_NEAR(params("8b"), 8.03e9, 1e7);
  EXPECT_NEAR(params("70b"), 70.55e9, 1e8);
}

TEST(Curve, FallsFromTheLeftToTheRight) {
  const auto lines = cli::draw_curve({3, 2, 1}, {.width = 3, .height = 3, .unicode = false});
  const std::vector<std::string> expected{"    3.0000 *  ", "            * ", "    1.0000   *"};
  EXPECT_EQ(lines, expected);
  EXPECT_TRUE(cli::draw_curve({1, std::nan("")}).empty());
  EXPECT_EQ(cli::draw_curve({2, 1}, {.width = 1, .height = 1})[0], "    2.0000 \u2881");
}

TEST(Options, StepInBackwardUpdatesParametersOnTheHost) {
  cli::TrainConfig config;
  config.device = "cuda";
  config.clip = 0;
  config.step_in_backward = true;
  EXPECT_TRUE(contains(
      message_of<ConfigError>([&] { cli::check(config, {}); }),
      "--step-in-backward: it updates parameters in host memory"));
  config.offload = true;
  cli::check(config, {});
}

TEST(Options, ValuesThatCannotBeAreRefused) {
  const auto refused = [](const Words& more, const std::string& message) {
    Words words{"train", "--dry-run"};
    words.insert(words.end(), more.begin(), more.end());
    const auto ended = run(words);
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(contains(ended.output, message));
  };
  for (const auto* option : {"--seed", "--clip", "--save-every", "--ranks", "--tied", "--lr"}) {
    refused({option, ""}, "it has no value; give one, or leave the option out");
  }
  refused({"--min-ranks", "-3"}, "--min-ranks: ");
  refused({"--warmup", "-1"}, "--warmup -1: it must be 0 or more");
  refused({"--min-lr", "-1"}, "--min-lr -1: it must be 0 or more");
  refused({"--norm-eps", "inf"}, "--norm-eps inf: it must be above 0, and finite");
  refused({"--rotary-base", "inf"}, "--rotary-base inf: it must be above 1, and finite");
  refused({"--lr", "inf"}, "--lr inf: it must be above 0, and finite");
  refused({"--clip", "inf"}, "--clip inf: it must be 0 (off) or more, and finite");
  refused({"--weight-decay", "inf"}, "--weight-decay inf: it must be 0 or more, and finite");
  refused(
      {"--seed", "99999999999999999999"}, "--seed 99999999999999999999: it must be a number of");
  refused({"--steps", "-99999999999999999999"}, "--steps -99999999999999999999: it must be a");
  refused({"--tied", "2"}, "--tied 2: it must be true or false");
  refused({"--offload=3"}, "--offload 3: it must be true or false");
  for (const auto* option : {"--data", "--run", "--mesh", "--model", "--resume"}) {
    refused({option, ""}, std::string(option) + ": it has no value; give one, or leave the option");
    refused({std::string(option) + "="}, std::string(option) + ": it has no value; ");
  }
  refused({"--shard-dtype", "bf16", "--optimizer", "muon"}, "only --optimizer adamw can round its");
  refused({"--moments", "8bit", "--optimizer", "muon"}, "--optimizer muon needs fp32");
  refused({"--shard-dtype", "bf16", "--param-dtype", "fp16"}, "fp16 needs --shard-dtype fp32");
  refused({"--rounding", "nearest"}, "--rounding nearest: nothing is rounded in fp32");
  refused({"--send-dtype", "bf16", "--param-dtype", "bf16"}, "use --reduce-dtype fp32, or");
  refused({"--float8", "rowwise", "--lora", "rank=4"}, "--lora trains beside weights that stay");
  refused(
      {"--float8", "rowwise", "--activation-checkpointing", "--keep-matmuls", "all"},
      "cannot keep products in float8; leave out one of them");
  refused({"--send-dtype", "bf16", "--ranks", "1"}, "parameters are not sharded; use more ranks");
  refused({"--device-budget", "1GiB"}, "everything stays on the device without --offload");
  refused({"--offload", "--device-budget", "1GB"}, "--device-budget 1GB: it must be a size like");
  refused({"--step-in-backward"}, "--clip needs all gradients before the first update; add --clip");
  refused({"--step-in-backward", "--clip", "0", "--optimizer", "muon"}, "use --optimizer adamw");
  refused({"--step-in-backward", "--clip", "0", "--param-dtype", "fp16"}, "use --param-dtype bf16");
  refused({"--keep-matmuls", "all"}, "nothing is recomputed without --activation-checkpointing");
  for (const std::string size : {"2GB", "GiB", "-1", "1e99", "all of them", "2 GiB"}) {
    refused(
        {"--activation-checkpointing", "--keep-matmuls", size},
        "--keep-matmuls " + size + ": it must be a size like 2GiB");
  }
  refused({"--config", ""}, "--config: it needs the name of a file");
  refused({"--config", "/dev/zero"}, "--config: /dev/zero is a device or a pipe");
  refused({"--data", "/dev/zero"}, "--data: /dev/zero is neither a file nor a folder");
}

// ------------------------------------------------------------ What a person sees

TEST(TrainScreen, DryRunOfSeventyBillionParameters) {
  const auto ended = run(
      {"train", "--model", "70b", "--ranks", "1024", "--batch", "1024", "--param-dtype", "bf16",
       "--dry-run"});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(contains(ended.output, "model     70.6 G parameters: 80 layers of 8192"));
  EXPECT_TRUE(contains(ended.output, "1024 over no network; 81 groups, "));
  EXPECT_TRUE(contains(ended.output, "161 all-gathers of "));
  EXPECT_TRUE(contains(ended.output, "81 reduce-scatters of "));
}

TEST(TrainScreen, ADryRunPrintsThePlanHoweverItIsAsked) {
  const auto data = text_file();
  const auto dry = [&](const Words& more) { return run(tiny_options(data, more)); };
  const auto quiet = dry({"--dry-run", "--quiet"});
  EXPECT_EQ(quiet.exit_code, 0) << quiet.output;
  EXPECT_EQ(quiet.output.find("model     "), 0u) << quiet.output;
  EXPECT_TRUE(contains(quiet.output, "\ntext      " + data + ": 1 file, "));
  const auto json = dry({"--dry-run", "--json", "--mesh", "shard=2,tp=2"});
  EXPECT_EQ(json.exit_code, 0) << json.output;
  EXPECT_EQ(count(json.output, "\n"), 1) << json.output;
  const auto plan = Json::parse(json.output);
  EXPECT_EQ(plan["event"], "plan");
  EXPECT_EQ(plan["traffic"].back()["axis"], "tp");
  EXPECT_EQ(plan["traffic"].back()["count"], 12); // 4 of each layer, and 4
  const auto refused = [&](const Words& more, const std::string& part) {
    const auto ended = dry(more);
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(contains(ended.output, part));
  };
  refused({"--dry-run", "--data", "/no/such/text"}, "--data: there is no file or folder");
  refused({"--dry-run", "--data", file_with("empty", "")}, "is too short: it has 0 bytes");
  refused({"--dry-run", "--context", "100000"}, "too little text for it");
  refused({"--dry-run", "--resume", "runs/x"}, "--dry-run and --resume contradict each other");
  refused({"--dry-run", "--batch", "4611686018427387904"}, "it must be 16777216 or less");
  refused({"--dry-run", "--accumulate", "9223372036854775807"}, "it must be 16777216 or less");
}

TEST(TrainScreen, TheCommandThatGoesOnWorksAsItIsPrinted) {
  const auto folder = temporary_folder() + "/with a space";
  const auto ended = run_script(
      "mkdir '" + folder + "' && cd '" + folder + "' && ln -s " + kTool + " fsdp && ./fsdp" +
      joined(tiny_options(text_file(), {"--steps", "2", "--run", "'a run/of mine'"})) +
      " > printed && sed -n 's/^saved .*; to train longer: //p' printed | tee again && bash again");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_EQ(ended.output.find("./fsdp train --resume 'a run/of mine' --steps 4\n"), 0u)
      << ended.output;
  EXPECT_EQ(metrics_of(folder + "/a run/of mine").size(), 4u);
  const auto started = run_script(
      "cd '" + folder +
      "' && FSDP_COMMAND='../my tree/fsdp' ./fsdp train --resume 'a run/of mine' "
      "--steps 5");
  EXPECT_TRUE(contains(started.output, "; to train longer: '../my tree/fsdp' train --resume "));
}

TEST(TrainScreen, WhatWasNotWrittenIsNotNamed) {
  const auto run_folder = temporary_folder() + "/run";
  run_script("mkdir -p " + run_folder + "/trace.json"); // no file can be written there
  const auto ended = run(tiny_options(text_file(), {"--steps", "3", "--run", run_folder}));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(contains(ended.output, "fsdp: no timeline: "));
  EXPECT_TRUE(contains(ended.output, "report    " + run_folder + "/report.html\n"));
  const auto none = temporary_folder() + "/run";
  run_script("mkdir -p " + none + "/trace.json " + none + "/report.html");
  const auto neither = run(tiny_options(text_file(), {"--steps", "3", "--run", none}));
  EXPECT_EQ(neither.exit_code, 0) << neither.output;
  EXPECT_TRUE(contains(neither.output, "fsdp: no report: "));
  EXPECT_EQ(count(neither.output, "report.html;"), 0) << neither.output;
  EXPECT_EQ(count(neither.output, "\nreport    "), 0) << neither.output;
}

TEST(TrainScreen, JsonIsOneObjectPerLine) {
  const auto ended = run(tiny(text_file(), {"--json", "--steps", "3", "--ranks", "2"}));
  ASSERT_EQ(ended.exit_code, 0) << ended.output;
  std::istringstream lines(ended.output);
  std::string events;
  for (std::string line; std::getline(lines, line);) {
    events += Json::parse(line)["event"].get<std::string>() + " ";
  }
  EXPECT_EQ(events, "plan step step step result sample saved ");
}

TEST(TrainScreen, GenerateGoesOnFromACheckpoint) {
  const auto run_folder = temporary_folder() + "/run";
  ASSERT_EQ(run(tiny_options(text_file(), {"--run", run_folder, "--quiet"})).exit_code, 0);
  const auto checkpoint = run_folder + "/checkpoints/step_00000030";
  const Words words{"generate", "--checkpoint", checkpoint, "--prompt", "for (", "--tokens", "20"};
  const auto once = run(words);
  EXPECT_EQ(once.exit_code, 0) << once.output;
  EXPECT_EQ(once.output.find("for ("), 0u) << once.output;
  EXPECT_EQ(once.output.size(), 26u) << once.output;
  // The text appears while it is generated: the first bytes are there long before the last.
  const auto first = run_script(
      kTool + " generate --checkpoint " + run_folder +
      " --prompt 'for (' --tokens 100000000 | head -c 25");
  EXPECT_EQ(first.output.substr(0, 25), once.output.substr(0, 25));
  EXPECT_EQ(run(words).output, once.output);
  for (const auto* temperature : {"-1", "nan", "inf"}) {
    const auto refused =
        run({"generate", "--checkpoint", run_folder, "--temperature", temperature});
    EXPECT_EQ(refused.exit_code, 2) << refused.output;
    EXPECT_TRUE(contains(refused.output, "it must be 0 (the likeliest token each time) or more"));
  }
  auto coldest = words;
  coldest.insert(coldest.end(), {"--temperature", "0"});
  auto cold = words;
  cold.insert(cold.end(), {"--temperature", "1e-300"});
  EXPECT_EQ(run(cold).output, run(coldest).output);
  const auto none = run({"generate", "--checkpoint", "/no/such/run"});
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_TRUE(contains(none.output, "--checkpoint: /no/such/run is not a checkpoint, and "));
  EXPECT_TRUE(contains(none.output, " has no complete one"));
}

TEST(Doctor, SaysWhatIsThere) {
  const auto ended = run({"doctor"});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  for (const auto* part : {"torch     ok ", "threads   ok ", "gloo      ok ", "text      ok "}) {
    EXPECT_TRUE(contains(ended.output, part));
  }
}

} // namespace
} // namespace fsdp::test
