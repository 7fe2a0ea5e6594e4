#include "cli/fuzz/python.h"

#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/files.h"
#include "cli/fuzz/fsdp2_script.h"
#include "cli/invocation.h"

namespace fsdp::cli::fuzz {

namespace {

using Json = nlohmann::json;

constexpr int kRanks = 2;
constexpr int kNoFsdp2 = 3;     // the exit code of the script
constexpr int kNoProgram = 127; // that of a shell

Json dtype_json(const std::optional<c10::ScalarType>& dtype) {
  return !dtype                   ? Json()
         : *dtype == c10::kDouble ? Json("double")
         : *dtype == c10::kFloat  ? Json("float")
                                  : Json("bfloat16");
}

const char* action_name(Action action) {
  switch (action) {
    case Action::Evaluate:
      return "evaluate";
    case Action::UnshardReshard:
      return "unshard_reshard";
    case Action::EditShards:
      return "edit_shards";
    case Action::SetReshard:
      return "set_reshard";
    default:
      return nullptr; // not in Python
  }
}

Json block_json(const Block& block) {
  static const std::array<const char*, 7> kinds{"linear", "mlp",   "norm",    "table",
                                                "scale",  "chain", "branches"};
  Json blocks = Json::array();
  for (const auto& inner : block.blocks) {
    blocks.push_back(block_json(inner));
  }
  return {
      {"kind", kinds[static_cast<size_t>(block.kind)]},
      {"size", block.size},
      {"bias", block.bias},
      {"frozen", block.frozen},
      {"checkpointed", block.recomputed},
      {"skip", block.skip == Skip::Never ? "never" : "odd_steps"},
      {"group", block.group},
      {"tied", block.tied},
      {"blocks", blocks}};
}

Json group_json(const Group& group) {
  return {
      {"reshard", group.reshard},
      {"param_dtype", dtype_json(group.param_dtype)},
      {"reduce_dtype", dtype_json(group.reduce_dtype)},
      {"output_dtype", dtype_json(group.output_dtype)},
      {"cast_inputs", group.cast_inputs},
      {"forward_prefetch", group.forward_prefetch},
      {"backward_prefetch", group.backward_prefetch}};
}

Json step_json(const Step& step) {
  Json events = Json::array();
  for (const auto& event : step.events) {
    events.push_back(
        {{"action", action_name(event.action)},
         {"target", event.target},
         {"microbatch", event.microbatch},
         {"value", event.value}});
  }
  return {
      {"events", events},
      {"microbatches", step.microbatches},
      {"sync_last", step.sync == Sync::Last},
      {"keep", step.keep},
      {"mark_last", step.mark_last},
      {"two", step.calls == Calls::SumOfTwo},
      {"rows", step.rows},
      {"input_grad", step.input_grad},
      {"clip", step.clip},
      {"update", step.update},
      {"zero", step.zero == Zero::ToNone    ? "to_none"
               : step.zero == Zero::ToZeros ? "to_zeros"
                                            : "never"}};
}

Json case_json(const Case& c) {
  Json groups = Json::array(), steps = Json::array();
  for (const auto& group : c.groups) {
    groups.push_back(group_json(group));
  }
  for (const auto& step : c.steps) {
    steps.push_back(step_json(step));
  }
  const bool sgd = c.optimizer == Optimizer::Sgd || c.optimizer == Optimizer::FsdpSgd;
  return {
      {"seed", c.seed},
      {"dim", c.dim},
      {"dtype", dtype_json(c.dtype)},
      {"root", block_json(c.root)},
      {"groups", groups},
      {"optimizer", sgd                              ? "sgd"
                    : c.optimizer == Optimizer::Adam ? "adam"
                                                     : "adamw"},
      {"steps", steps},
      {"parameter_seed", parameter_seed(c, 0)},
      {"batch_seed", batch_seed(c, 0, 0, 0, 0)}};
}

void flatten(const Json& value, std::vector<double>& numbers) {
  if (!value.is_array()) {
    numbers.push_back(value.is_number() ? value.get<double>() : NAN);
    return;
  }
  for (const auto& each : value) {
    flatten(each, numbers);
  }
}

/// Returns how the parameters differ, or "".
std::string difference(const ForPython& here, const Json& there) {
  for (const auto& [name, tensor] : here.parameters) {
    if (!there.contains(name)) {
      return "Python has no parameter " + name;
    }
    std::vector<double> numbers;
    flatten(there.at(name), numbers);
    const auto mine = tensor.to(torch::kDouble).flatten();
    const auto other = torch::tensor(numbers, torch::kDouble);
    if (mine.numel() != other.numel()) {
      return "the size of " + name + " is another one in Python";
    }
    if (mine.numel() == 0) {
      continue;
    }
    const auto error = (mine - other).abs().max().item<double>();
    if (!(error <= tolerance(here.c) * (1 + other.abs().max().item<double>()))) {
      return c10::str(name, " differs by ", error, "\n  is ", mine, "\n  in Python ", other);
    }
  }
  return "";
}

/// A folder that is removed at the end, with the files that are named here.
class Folder {
 public:
  Folder() {
    const char* base = std::getenv("TMPDIR");
    path_ = std::string(base ? base : P_tmpdir) + "/fsdp_fuzz_XXXXXX";
    TORCH_CHECK(mkdtemp(path_.data()), "cannot make a folder like ", path_);
  }
  ~Folder() {
    for (const auto* name : {"fsdp2.py", "cases.json", "results.json", "log"}) {
      unlink(file(name).c_str());
    }
    rmdir(path_.c_str());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string file(const std::string& name) const {
    return path_ + "/" + name;
  }

 private:
  std::string path_;
};

std::string find_python() {
  const char* chosen = std::getenv("FSDP_PYTHON");
  return chosen && *chosen ? chosen : find_in_path("python3");
}

} // namespace

void leave_to_python(Case& c) {
  c.ranks = kRanks;
  for (auto& group : c.groups) {
    group.mesh = Mesh::Shard;
    group.dim = 0;
    group.offload = false;
    group.min_shard_numel = 0;
    group.reduce_unused = false;
  }
  std::map<int, int> members;
  const std::function<void(const Block&)> count = [&](const Block& block) {
    for (const auto& inner : block.blocks) {
      members[inner.group] += inner.group != block.group ? 1 : 0;
      count(inner);
    }
  };
  count(c.root);
  const std::function<void(Block&)> run = [&](Block& block) {
    // Python leaves a group of several modules gathered if one of them does not run.
    const bool may_skip = block.skip == Skip::OddSteps && members[block.group] < 2;
    block.skip = may_skip ? block.skip : Skip::Never;
    std::for_each(block.blocks.begin(), block.blocks.end(), run);
  };
  run(c.root);
  for (auto& step : c.steps) {
    step.throws_in_forward = step.throws_in_backward = -1;
    step.sync = step.sync == Sync::LastOverReplicas ? Sync::Last : step.sync;
    step.calls = step.calls == Calls::One ? Calls::One : Calls::SumOfTwo;
    std::erase_if(
        step.events, [](const Event& event) { return action_name(event.action) == nullptr; });
  }
}

bool fits_python(const Case& c) {
  auto left = c;
  leave_to_python(left);
  return left == c;
}

PythonResult run_python(const std::vector<ForPython>& cases, double seconds) {
  PythonResult result;
  const auto python = find_python();
  const Folder folder;
  const auto log = quoted(folder.file("log"));
  Json all = Json::array();
  for (const auto& each : cases) {
    all.push_back(case_json(each.c));
  }
  std::ofstream(folder.file("fsdp2.py")) << kFsdp2Script;
  std::ofstream(folder.file("cases.json")) << all;
  const auto command = c10::str(
      "OMP_NUM_THREADS=1 ", quoted(python), " ", quoted(folder.file("fsdp2.py")), " ",
      quoted(folder.file("cases.json")), " ", quoted(folder.file("results.json")), " ", seconds,
      " > ", log, " 2>&1");
  const int status = python.empty() || cases.empty() ? 0 : std::system(command.c_str());
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  if (python.empty() || code == kNoFsdp2 || code == kNoProgram) {
    result.missing = "there is no Python with FSDP2 (FSDP_PYTHON names an interpreter)";
    return result;
  }
  std::ifstream lines(folder.file("results.json"));
  for (std::string line; std::getline(lines, line);) {
    const auto there = Json::parse(line);
    const auto& here = *std::find_if(cases.begin(), cases.end(), [&](const ForPython& each) {
      return each.c.seed == there.at("seed").get<uint64_t>();
    });
    ++result.num_cases;
    const auto text = there.contains("error") ? there.at("error").get<std::string>()
                                              : difference(here, there.at("parameters"));
    if (!text.empty()) {
      const auto* kind = there.contains("error") ? "Python throws" : "Python has other parameters";
      result.failures.push_back({here.c, {kind, c10::str(kind, ": ", text)}});
    }
  }
  if (code != 0) {
    std::ifstream file(folder.file("log"));
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    result.failures.push_back(
        {cases.empty() ? Case{} : cases[std::min<size_t>(result.num_cases, cases.size() - 1)].c,
         {"Python failed", "Python failed: " + text.substr(0, 2000)}});
  }
  return result;
}

} // namespace fsdp::cli::fuzz
