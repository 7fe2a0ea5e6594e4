// The part of a printed program that defines the modules.
#include <c10/util/StringUtil.h>

#include <sstream>

#include "cli/fuzz/program_parts.h"

namespace fsdp::cli::fuzz {

namespace {

/// Prints the classes of the blocks, the inner ones first.
class Classes {
 public:
  explicit Classes(const Case& c, std::ostream& out) : case_(c), out_(out) {
    print(c.root, /*first=*/true);
  }

 private:
  struct Members {
    std::ostringstream constructor, names;
  };

  std::string shown(const Block& block, const std::string& name) const {
    const auto dtype = case_.groups[block.group].param_dtype;
    return dtype ? c10::str("cast(plain, ", name, ", ", dtype_text(*dtype), ")") : name;
  }

  void parameter(
      Members& members, const Block& block, const std::string& name, const std::string& sizes) {
    members.names << "  torch::Tensor " << name << ";\n";
    members.constructor << c10::str(
        "    ", name, " = register_parameter(\"", name, "\", values({", sizes, "}, kDtype, ",
        parameter_seed(case_, num_params_++), ").mul_(0.5), ", bool_text(!block.frozen), ");\n");
  }

  void parameters(Members& members, const Block& block) {
    const auto dim = std::to_string(case_.dim), size = std::to_string(block.size);
    switch (block.kind) {
      case Kind::Linear:
        parameter(members, block, "weight", dim + ", " + dim);
        break;
      case Kind::Mlp:
        parameter(members, block, "up", size + ", " + dim);
        parameter(members, block, "down", dim + ", " + size);
        break;
      case Kind::Norm:
        parameter(members, block, "weight", dim);
        break;
      case Kind::Table:
        parameter(members, block, "table", size + ", " + dim);
        break;
      case Kind::Scale:
        parameter(members, block, "scale", size);
        break;
      default:
        break;
    }
    if (block.bias && block.kind != Kind::Table && block.kind != Kind::Scale) {
      parameter(members, block, "bias", dim);
    }
  }

  static std::string condition(const Block& block) {
    return block.skip == Skip::OddSteps   ? "step % 2 == 0"
           : block.skip == Skip::OddRanks ? "(step + fsdp::get_rank()) % 2 == 0"
                                          : "true";
  }

  void calls(std::ostream& body, const Block& block) const {
    const bool chain = block.kind == Kind::Chain;
    const auto indent = chain && block.size > 1 ? "      " : "    ";
    body << "    auto y = x;\n";
    if (chain && block.size > 1) {
      body << "    for (int i = 0; i < " << block.size << "; ++i) {\n";
    }
    for (size_t i = 0; i < block.blocks.size(); ++i) {
      const auto& inner = block.blocks[i];
      body << indent;
      if (inner.skip != Skip::Never) {
        body << "if (" << condition(inner) << ") ";
      }
      body << "y = " << (chain ? c10::str("b", i, "(y)") : c10::str("y + b", i, "(x)")) << ";\n";
      if (inner.skip == Skip::OddRanks) {
        body << indent << "else y = y.clone();\n";
      }
    }
    if (chain && block.size > 1) {
      body << "    }\n";
    }
    if (block.bias) {
      body << "    y = torch::tanh(y) + " << shown(block, "bias") << ";\n";
    }
  }

  std::string formula(const Block& block) const {
    const auto bias = block.bias ? shown(block, "bias") : "torch::Tensor()";
    switch (block.kind) {
      case Kind::Linear:
        return c10::str("torch::tanh(torch::linear(x, ", shown(block, "weight"), ", ", bias, "))");
      case Kind::Mlp:
        return c10::str(
            "x + torch::linear(torch::tanh(torch::linear(x, ", shown(block, "up"), ")), ",
            shown(block, "down"), ", ", bias, ")");
      case Kind::Norm:
        return c10::str(
            "torch::layer_norm(x, {kDim}, ", shown(block, "weight"), ", ", bias, ", 0.1)");
      case Kind::Table:
        return c10::str(
            "x + torch::embedding(", shown(block, "table"), ", torch::arange(x.size(0)).remainder(",
            block.size, "))");
      default:
        return c10::str("x * (", shown(block, "scale"), ".mean() + 1)");
    }
  }

  void print(const Block& block, bool first) {
    const int number = num_blocks_++;
    const auto name = number == 0 ? std::string("Net") : c10::str("Block", number);
    Members members;
    parameters(members, block);
    for (size_t i = 0; i < block.blocks.size(); ++i) {
      const auto& inner = block.blocks[i];
      const auto type = c10::str("Block", num_blocks_);
      print(inner, inner.group != block.group);
      members.names << c10::str("  ", type, " b", i, "{nullptr};\n");
      members.constructor << c10::str(
          "    b", i, " = register_module(\"b", i, "\", ", type, "(plain));\n");
      if (inner.tied >= 0) {
        members.constructor << c10::str("    fsdp::tie_weights(b", i, ", b", inner.tied, ");\n");
      }
    }
    const auto& group = case_.groups[block.group];
    std::ostringstream body;
    if (first && group.cast_inputs && group.param_dtype) {
      body << "    x = cast(plain, x, " << dtype_text(*group.param_dtype) << ");\n";
    }
    body << "    throw_in_forward(" << number << ");\n";
    if (is_container(block.kind)) {
      calls(body, block);
    } else {
      const char* weight = block.kind == Kind::Mlp     ? "up"
                           : block.kind == Kind::Table ? "table"
                           : block.kind == Kind::Scale ? "scale"
                                                       : "weight";
      body << "    x = x.to(" << shown(block, weight) << ".scalar_type());\n";
      body << "    auto y = " << formula(block) << ";\n";
    }
    body << "    throw_in_backward(" << number << ", y);\n";
    body << "    return "
         << (first && group.output_dtype
                 ? c10::str("cast(plain, y, ", dtype_text(*group.output_dtype), ")")
                 : "y")
         << ";\n";
    out_ << c10::str(
        "struct ", name, "Impl : torch::nn::Module {\n  explicit ", name,
        "Impl(bool plain) : plain(plain) {\n", members.constructor.str(),
        "  }\n  torch::Tensor forward(torch::Tensor x) {\n", body.str(), "  }\n  bool plain;\n",
        members.names.str(), "};\nFSDP_MODULE(", name, ");\n\n");
  }

  const Case& case_;
  std::ostream& out_;
  int num_blocks_ = 0;
  int num_params_ = 0;
};

} // namespace

std::string print_classes(const Case& c) {
  std::ostringstream out;
  Classes(c, out);
  return out.str();
}

} // namespace fsdp::cli::fuzz
