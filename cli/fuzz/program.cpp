#include "cli/fuzz/program.h"

#include <c10/util/StringUtil.h>

#include <map>
#include <sstream>

#include "cli/fuzz/program_parts.h"

namespace fsdp::cli::fuzz {

namespace {

/// Prints the calls that shard the model.
class Setup {
 public:
  Setup(const Case& c, std::ostream& out) : case_(c), out_(out) {
    recompute(c.root, "net");
    below(c.root, "net");
    shard(0, {"net"});
    settings();
  }

 private:
  void recompute(const Block& block, const std::string& path) {
    if (block.recomputed) {
      out_ << "  fsdp::apply_activation_checkpointing(" << path
           << (block.keeps_matmuls ? ", {.save = fsdp::save_matmuls()}" : "") << ");\n";
    }
    for (size_t i = 0; i < block.blocks.size(); ++i) {
      recompute(block.blocks[i], c10::str(path, "->b", i));
    }
  }

  void below(const Block& block, const std::string& path) {
    for (size_t i = 0; i < block.blocks.size(); ++i) {
      below(block.blocks[i], c10::str(path, "->b", i));
    }
    std::map<int, std::vector<std::string>> together;
    for (size_t i = 0; i < block.blocks.size(); ++i) {
      if (block.blocks[i].group != block.group) {
        together[block.blocks[i].group].push_back(c10::str(path, "->b", i));
      }
    }
    for (const auto& [group, paths] : together) {
      shard(group, paths);
    }
  }

  static std::string joined(const std::vector<std::string>& parts) {
    std::string text;
    for (const auto& part : parts) {
      text += (text.empty() ? "" : ", ") + part;
    }
    return text;
  }

  static std::string policy(const Group& group) {
    std::vector<std::string> parts;
    if (group.param_dtype) {
      parts.push_back(".param_dtype = " + dtype_text(*group.param_dtype));
    }
    if (group.reduce_dtype) {
      parts.push_back(".reduce_dtype = " + dtype_text(*group.reduce_dtype));
    }
    if (group.output_dtype) {
      parts.push_back(".output_dtype = " + dtype_text(*group.output_dtype));
    }
    if (!group.cast_inputs) {
      parts.push_back(".cast_forward_inputs = false");
    }
    return ".mp_policy = {" + joined(parts) + "}";
  }

  void shard(int index, const std::vector<std::string>& paths) {
    const auto& group = case_.groups[index];
    std::vector<std::string> options;
    if (group.mesh == Mesh::Hsdp) {
      options.push_back(c10::str(
          ".mesh = fsdp::init_device_mesh(torch::kCPU, {", case_.ranks / 2,
          ", 2}, {\"replicate\", \"shard\"})"));
    }
    if (group.reshard >= 0) {
      options.push_back(
          ".reshard_after_forward = " +
          (group.reshard <= 1 ? bool_text(group.reshard == 1) : std::to_string(group.reshard)));
    }
    if (group.dim > 0) {
      options.push_back(
          ".shard_placement_fn = [](const std::string&, const torch::Tensor& param) {\n"
          "        return std::optional(fsdp::ShardPlacement{.dim = param.dim() - 1}); }");
    }
    if (group.has_policy()) {
      options.push_back(policy(group));
    }
    if (group.offload) {
      options.emplace_back(".offload_policy = fsdp::CPUOffloadPolicy{}");
    }
    if (group.min_shard_numel > 0) {
      options.push_back(c10::str(".min_shard_numel = ", group.min_shard_numel));
    }
    const auto modules =
        paths.size() == 1 ? paths[0] : "std::vector<fsdp::ModuleRef>{" + joined(paths) + "}";
    out_ << c10::str(
        "  [[maybe_unused]] auto group", index,
        " = fsdp::", group.mesh == Mesh::Replicate ? "replicate(" : "fully_shard(", modules,
        options.empty() ? "" : ", {" + joined(options) + "}", ");\n");
  }

  void settings() {
    for (size_t i = 0; i < case_.groups.size(); ++i) {
      const auto& group = case_.groups[i];
      prefetch(i, "forward", group.forward_prefetch);
      prefetch(i, "backward", group.backward_prefetch);
      if (group.reduce_unused) {
        out_ << c10::str("  group", i, ".set_reduce_scatter_unused_params(true, false);\n");
      }
    }
  }
  void prefetch(size_t i, const char* when, const std::vector<int>& list) {
    if (!list.empty()) {
      std::vector<std::string> names;
      for (const int group : list) {
        names.push_back(c10::str("group", group));
      }
      out_ << c10::str(
          "  group", i, ".set_modules_to_", when, "_prefetch({", joined(names), "});\n");
    }
  }

  const Case& case_;
  std::ostream& out_;
};

} // namespace

std::string program(const Case& c, const std::string& failure) {
  std::ostringstream out;
  std::istringstream lines(failure.substr(0, 1000));
  for (std::string line; std::getline(lines, line);) {
    out << "// " << line << "\n";
  }
  std::string begin = kProgramBegin;
  const std::string constants = c10::str(
      "constexpr int64_t kDim = ", c.dim, ";\nconstexpr auto kDtype = ", dtype_text(c.dtype),
      ";\nconstexpr double kTolerance = ", tolerance(c),
      ";\n[[maybe_unused]] constexpr uint64_t kBatchSeed = ", batch_seed(c, 0, 0, 0, 0), ";\n\n");
  begin.insert(begin.find("thread_local"), constants);
  out << begin;
  out << print_classes(c);
  out << "void train(int rank) {\n  Net net(/*plain=*/false), plain(/*plain=*/true);\n";
  out << (c.optimizer_first ? print_optimizers(c) : "");
  Setup(c, out);
  out << (c.optimizer_first ? "" : print_optimizers(c)) << print_steps(c);
  out << "}\n\nint main() {\n  torch::set_num_threads(1);\n  fsdp::run_ranks(" << c.ranks
      << ", train);\n}\n";
  return out.str();
}

} // namespace fsdp::cli::fuzz
