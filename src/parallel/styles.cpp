#include "parallel/styles.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <utility>

#include "layout/shard_layout.h"
#include "module/module_tree.h"
#include "parallel/local_move.h"
#include "param/tensor_piece.h"

namespace fsdp::detail {

namespace {

using torch::nn::EmbeddingImpl;
using torch::nn::LinearImpl;
using Tensors = ForwardHook::Tensors;
using AtOutputs = ForwardHook::AtOutputs;

/// Replaces the value of `target` while this object lives.
template <class T>
class ScopedReplace {
 public:
  ScopedReplace(T& target, T value)
      : target_(target), kept_(std::exchange(target, std::move(value))) {}
  ~ScopedReplace() {
    target_ = std::move(kept_);
  }
  ScopedReplace(const ScopedReplace&) = delete;
  ScopedReplace& operator=(const ScopedReplace&) = delete;

 private:
  T& target_;
  T kept_;
};

MoveLabel label_of(const StyledModule& at, const std::string& which) {
  return {kParallelizeTag + which + " of " + at.text(), at.name};
}

at::Tensor& first(const Tensors& tensors, const MoveLabel& label) {
  TORCH_CHECK_VALUE(
      !tensors.empty() && tensors.front()->defined(), label.what, " is no tensor, or undefined");
  return *tensors.front();
}

/// Returns the size along `dim` of the whole parameter; `param` is this rank's piece of it.
int64_t whole_size(const at::Tensor& param, int64_t dim) {
  return TensorPiece::find(param)->spec().sizes[dim];
}

/// The hook owns `style`, so `style` outlives every call of the module.
template <class Style>
// NOLINTNEXTLINE(performance-unnecessary-value-param): the check does not see that `name` is moved.
ForwardHook hook_of(std::string name, Style style) {
  return {
      .name = std::move(name),
      .begin = [style = std::make_shared<const Style>(std::move(style))](const Tensors& inputs) {
        return style->begin(inputs);
      }};
}

// ------------------------------------------------------------ Colwise

/// ColwiseParallel of a Linear or an Embedding.
struct Colwise {
  StyledModule at;
  ColwiseParallel style;
  int64_t num_features;               // of the whole output
  EmbeddingImpl* embedding = nullptr; // null for a Linear
  MoveLabel input_label = label_of(at, "input 0");
  MoveLabel output_label = label_of(at, "output 0");

  AtOutputs begin(const Tensors& inputs) const {
    auto& input = first(inputs, input_label);
    // Every rank computes other features from the input, so the input's gradients are summed.
    input = move_input(input, {at.mesh, style.input_layouts, Replicate{}, Partial{}}, input_label);
    // A table without columns gets one, because on CUDA a lookup in it would read out of bounds.
    std::shared_ptr<ScopedReplace<at::Tensor>> weight;
    if (embedding && embedding->weight.size(1) == 0) {
      const auto column = at::zeros({embedding->weight.size(0), 1}, embedding->weight.options());
      weight = std::make_shared<ScopedReplace<at::Tensor>>(
          embedding->weight, at::cat({embedding->weight, column}, /*dim=*/1));
    }
    return [this, weight](const Tensors& outputs) {
      auto& output = first(outputs, output_label);
      output = weight ? output.narrow(-1, 0, 0) : output;
      auto sizes = output.sizes().vec();
      sizes.back() = num_features;
      record_uneven_division(at.mesh, output.dim() - 1, num_features);
      output = move_local(output, {at.mesh, Shard{-1}, style.output_layouts}, output_label, sizes);
    };
  }
};

// ------------------------------------------------------------ Rowwise

struct RowwiseLinear {
  StyledModule at;
  RowwiseParallel style;
  LinearImpl* linear;
  MoveLabel input_label = label_of(at, "input 0");
  MoveLabel output_label = label_of(at, "output 0");
  MoveLabel bias_label = label_of(at, "the bias");

  AtOutputs begin(const Tensors& inputs) const {
    auto& input = first(inputs, input_label);
    input = move_input(input, {at.mesh, style.input_layouts, Shard{-1}}, input_label);
    TORCH_CHECK_VALUE(
        input.size(-1) == linear->weight.size(1), input_label.what, " has sizes ", input.sizes(),
        ", but this rank of ", axis_text(at.mesh), " holds ", linear->weight.size(1), " of ",
        whole_size(linear->weight, 1), " input features: does it lie as input_layouts says?");
    std::shared_ptr<ScopedReplace<at::Tensor>> bias;
    if (linear->bias.defined()) {
      // Only one rank adds the bias. Every rank computes the bias's whole gradient, because every
      // rank has the output's whole gradient.
      auto term = move_local(linear->bias, {at.mesh, Replicate{}, Partial{}}, bias_label);
      bias = std::make_shared<ScopedReplace<at::Tensor>>(linear->bias, std::move(term));
    }
    return [this, bias](const Tensors& outputs) {
      auto& output = first(outputs, output_label);
      output = move_local(output, {at.mesh, Partial{}, style.output_layouts}, output_label);
    };
  }
};

/// One lookup in this rank's rows of the table. Tokens in other ranks' rows give zeros.
class VocabularyLookup {
 public:
  VocabularyLookup(EmbeddingImpl& embedding, at::Tensor& tokens, Run rows) {
    const auto local = tokens - rows.offset;
    is_elsewhere_ = (local < 0) | (local >= rows.length);
    tokens = local.masked_fill(is_elsewhere_, 0);
    std::optional<int64_t> padding;
    if (const auto& whole = embedding.options.padding_idx();
        whole && *whole >= rows.offset && *whole < rows.offset + rows.length) {
      padding = *whole - rows.offset;
    }
    padding_.emplace(embedding.options.padding_idx(), padding);
    if (rows.length == 0) { // a lookup needs at least one row
      const auto& weight = embedding.weight;
      weight_.emplace(
          embedding.weight, at::cat({weight, at::zeros({1, weight.size(1)}, weight.options())}));
    }
  }

  at::Tensor masked(const at::Tensor& output) const {
    return output.masked_fill(is_elsewhere_.unsqueeze(-1), 0);
  }

 private:
  at::Tensor is_elsewhere_;
  std::optional<ScopedReplace<std::optional<int64_t>>> padding_;
  std::optional<ScopedReplace<at::Tensor>> weight_;
};

struct RowwiseEmbedding {
  StyledModule at;
  RowwiseParallel style;
  EmbeddingImpl* embedding;
  int64_t num_rows = whole_size(embedding->weight, 0);
  Run rows = chunk_run(num_rows, at.mesh.size(), at.mesh.get_local_rank());
  MoveLabel input_label = label_of(at, "input 0");
  MoveLabel output_label = label_of(at, "output 0");

  AtOutputs begin(const Tensors& inputs) const {
    auto& tokens = first(inputs, input_label);
    tokens = move_input(tokens, {at.mesh, style.input_layouts, Replicate{}}, input_label);
    // Without this check, a token outside of the table would give zeros on every rank.
    at::_assert_async(
        ((tokens >= 0) & (tokens < num_rows)).all(),
        input_label.what + " has a number that is none of the table's rows");
    const auto lookup = std::make_shared<VocabularyLookup>(*embedding, tokens, rows);
    return [this, lookup](const Tensors& outputs) {
      auto& output = first(outputs, output_label);
      output = move_local(
          lookup->masked(output), {at.mesh, Partial{}, style.output_layouts}, output_label);
    };
  }
};

// ------------------------------------------------------------ Sequence, Prepare

struct Sequence {
  StyledModule at;
  int64_t dim;
  MoveLabel input_label = label_of(at, "input 0");

  AtOutputs begin(const Tensors& inputs) const {
    const auto& input = first(inputs, input_label);
    TORCH_CHECK_VALUE(
        dim >= -input.dim() && dim < input.dim(), input_label.what, " has sizes ", input.sizes(),
        ", which ", axis_text(at.mesh), " cannot divide along dim ", dim);
    return {};
  }
};

/// Moves all inputs or all outputs of a module.
struct Preparation {
  StyledModule at;
  std::string role; // "input" or "output"
  Layouts from, to;
  std::vector<MoveLabel> labels = {};

  void check(const char* style) const {
    TORCH_CHECK_VALUE(
        from.each().size() == to.each().size(), kParallelizeTag, style, " of ", at.text(), ": ",
        role, "_layouts and desired_", role, "_layouts should have same length, not ",
        from.each().size(), " and ", to.each().size());
  }
  Preparation with_labels() && {
    for (size_t i = 0; i < from.each().size(); ++i) {
      labels.push_back(label_of(at, c10::str(role, " ", i)));
    }
    return std::move(*this);
  }
  void run(const Tensors& tensors) const {
    TORCH_CHECK_VALUE(
        tensors.size() == labels.size(), kParallelizeTag, at.text(), " has ", tensors.size(),
        " tensors as ", role, ", but the plan gives ", labels.size(), " ", role,
        "_layouts: they should have same length");
    for (size_t i = 0; i < labels.size(); ++i) {
      auto& tensor = *tensors[i];
      if (from.each()[i] && to.each()[i] && tensor.defined()) {
        const LocalMove move{at.mesh, *from.each()[i], *to.each()[i]};
        tensor = role == "input" ? move_input(tensor, move, labels[i])
                                 : move_local(tensor, move, labels[i]);
      }
    }
  }
  AtOutputs begin(const Tensors& inputs) const {
    if (role == "input") {
      run(inputs);
      return {};
    }
    return [this](const Tensors& outputs) { run(outputs); };
  }
};

template <class Style>
Preparation input_of(const StyledModule& at, const Style& style) {
  return {at, "input", style.input_layouts, style.desired_input_layouts};
}
template <class Style>
Preparation output_of(const StyledModule& at, const Style& style) {
  return {at, "output", style.output_layouts, style.desired_output_layouts};
}

// ------------------------------------------------------------ Which style does what

void check_layout(const StyledModule& at, const char* field, const Placement& layout) {
  TORCH_CHECK_VALUE(
      can_move(layout), kParallelizeTag, field, " of ", at.text(), " is ", to_string(layout),
      ", which ", axis_text(at.mesh), " cannot do: take Replicate, Shard or Partial (a sum)");
}

using Divisions = std::vector<ParamDivision>;

/// Only the module's own parameters, not those of its submodules.
Divisions divisions(const StyledModule& at, const Placement& weight, const Placement& bias) {
  Divisions result;
  for (const auto& item : at.module->named_parameters(/*recurse=*/false)) {
    const auto& name = item.key();
    result.push_back({join_names(at.name, name), item.value(), name == "bias" ? bias : weight});
  }
  return result;
}

/// Returns the dim of the weight that the style divides: `linear` for a Linear, `embedding` for an
/// Embedding. Throws NotImplementedError for other modules.
int64_t divided_dim(const StyledModule& at, const char* style, int64_t linear, int64_t embedding) {
  if (dynamic_cast<const LinearImpl*>(at.module)) {
    return linear;
  }
  const auto* table = dynamic_cast<const EmbeddingImpl*>(at.module);
  TORCH_CHECK_NOT_IMPLEMENTED(
      table, kParallelizeTag, style, " currently only supports Linear and Embedding, not ",
      at.text());
  // max_norm needs whole rows, and scale_grad_by_freq counts tokens.
  TORCH_CHECK_NOT_IMPLEMENTED(
      !table->options.max_norm() && !table->options.scale_grad_by_freq(), kParallelizeTag, style,
      " of ", at.text(), " does not support its options max_norm and scale_grad_by_freq");
  return embedding;
}

struct DivisionsOf {
  const StyledModule& at;

  Divisions operator()(const ColwiseParallel& style) const {
    check_layout(at, "input_layouts", style.input_layouts);
    check_layout(at, "output_layouts", style.output_layouts);
    return divisions(at, Shard{divided_dim(at, "ColwiseParallel", 0, 1)}, Shard{0});
  }
  Divisions operator()(const RowwiseParallel& style) const {
    check_layout(at, "input_layouts", style.input_layouts);
    check_layout(at, "output_layouts", style.output_layouts);
    return divisions(at, Shard{divided_dim(at, "RowwiseParallel", 1, 0)}, Replicate{});
  }
  Divisions operator()(const SequenceParallel&) const {
    Divisions result;
    for (const auto& [name, param] : named_parameters(*at.module)) {
      // Each rank has part of the sequence, and so of the gradients.
      result.push_back({join_names(at.name, name), param, Replicate{}, /*sum_grads=*/true});
    }
    return result;
  }
  Divisions operator()(const PrepareModuleInput& style) const {
    return prepared("PrepareModuleInput", {input_of(at, style)});
  }
  Divisions operator()(const PrepareModuleOutput& style) const {
    return prepared("PrepareModuleOutput", {output_of(at, style)});
  }
  Divisions operator()(const PrepareModuleInputOutput& style) const {
    return prepared("PrepareModuleInputOutput", {input_of(at, style), output_of(at, style)});
  }

 private:
  Divisions prepared(const char* style, const std::vector<Preparation>& preparations) const {
    for (const auto& preparation : preparations) {
      preparation.check(style);
      for (const auto& layouts : {preparation.from, preparation.to}) {
        for (const auto& layout : layouts.each()) {
          check_layout(at, style, layout.value_or(Replicate{}));
        }
      }
    }
    return {};
  }
};

struct HooksOf {
  using Hooks = std::vector<ForwardHook>;
  const StyledModule& at;

  Hooks operator()(const ColwiseParallel& style) const {
    if (const auto* linear = dynamic_cast<const LinearImpl*>(at.module)) {
      return {hook_of("ColwiseParallel", Colwise{at, style, whole_size(linear->weight, 0)})};
    }
    auto& embedding = dynamic_cast<EmbeddingImpl&>(*at.module);
    const auto num_features = whole_size(embedding.weight, 1);
    return {hook_of("ColwiseParallel", Colwise{at, style, num_features, &embedding})};
  }
  Hooks operator()(const RowwiseParallel& style) const {
    if (auto* linear = dynamic_cast<LinearImpl*>(at.module)) {
      return {hook_of("RowwiseParallel", RowwiseLinear{at, style, linear})};
    }
    auto* embedding = dynamic_cast<EmbeddingImpl*>(at.module);
    return {hook_of("RowwiseParallel", RowwiseEmbedding{at, style, embedding})};
  }
  Hooks operator()(const SequenceParallel& style) const {
    return {hook_of("SequenceParallel", Sequence{at, style.sequence_dim})};
  }
  Hooks operator()(const PrepareModuleInput& style) const {
    return prepared("PrepareModuleInput", {input_of(at, style)});
  }
  Hooks operator()(const PrepareModuleOutput& style) const {
    return prepared("PrepareModuleOutput", {output_of(at, style)});
  }
  Hooks operator()(const PrepareModuleInputOutput& style) const {
    return prepared("PrepareModuleInputOutput", {input_of(at, style), output_of(at, style)});
  }

 private:
  /// Makes no hook for a preparation without layouts.
  static Hooks prepared(const char* style, std::vector<Preparation> preparations) {
    Hooks hooks;
    for (auto& each : preparations) {
      if (!each.from.each().empty()) {
        hooks.push_back(hook_of(style, std::move(each).with_labels()));
      }
    }
    return hooks;
  }
};

} // namespace

std::string StyledModule::text() const {
  const auto type = type_name(*module);
  return name.empty() ? "the " + type : "'" + name + "' (" + type + ")";
}

std::vector<ParamDivision> param_divisions(const StyledModule& at, const ParallelStyle& style) {
  return std::visit(DivisionsOf{at}, style);
}

bool divides(const ParallelStyle& style) {
  return std::holds_alternative<ColwiseParallel>(style) ||
         std::holds_alternative<RowwiseParallel>(style) ||
         std::holds_alternative<SequenceParallel>(style);
}

std::vector<const char*> prepared_sides(const ParallelStyle& style) {
  if (std::holds_alternative<PrepareModuleInput>(style)) {
    return {"input"};
  }
  if (std::holds_alternative<PrepareModuleOutput>(style)) {
    return {"output"};
  }
  return std::holds_alternative<PrepareModuleInputOutput>(style)
             ? std::vector<const char*>{"input", "output"}
             : std::vector<const char*>{};
}

std::vector<ForwardHook> forward_hooks(const StyledModule& at, const ParallelStyle& style) {
  auto hooks = std::visit(HooksOf{at}, style);
  for (auto& hook : hooks) {
    hook.divides_params = divides(style);
  }
  return hooks;
}

} // namespace fsdp::detail
