#include "state/saved_tensor_hooks.h"

#include <torch/csrc/autograd/engine.h>

#include <utility>

#include "runtime/autograd_compat.h"

namespace fsdp::detail {

namespace {

namespace autograd = torch::autograd;

thread_local HookSource* innermost = nullptr;

/// Only an engine can give autograd default hooks. This one passes everything else to the engine
/// that was there before, which owns the threads of the devices.
class EngineWithHooks : public autograd::Engine {
 public:
  explicit EngineWithHooks(autograd::Engine& engine) : engine_(engine) {}

  std::unique_ptr<autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return innermost ? innermost->make_hooks() : engine_.get_default_saved_variable_hooks();
  }
  autograd::variable_list execute(
      const autograd::edge_list& roots,
      const autograd::variable_list& inputs,
      bool keep_graph,
      bool create_graph,
      bool accumulate_grad,
      const autograd::edge_list& outputs) override {
    return engine_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<autograd::GraphTask>& graph_task,
      NodePtr graph_root,
      autograd::InputBuffer&& input_buffer) override {
    return engine_.execute_with_graph_task(
        graph_task, std::move(graph_root), std::move(input_buffer));
  }
  std::unique_ptr<autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return engine_.make_anomaly_metadata();
  }

 private:
  autograd::Engine& engine_;
};

/// Never destroyed, because a backward may run while the process ends.
autograd::Engine& engine_with_hooks() {
  static auto& engine = *new EngineWithHooks(autograd::Engine::get_default_engine());
  return engine;
}

void install() {
  static const bool done = [] {
    engine_with_hooks(); // while the other one is still the default
    autograd::set_default_engine_stub(&engine_with_hooks);
    return true;
  }();
  (void)done;
}

} // namespace

SavingThrough::SavingThrough(HookSource& source) : outer_(innermost) {
  install();
  innermost = &source;
}

SavingThrough::~SavingThrough() {
  innermost = outer_;
}

} // namespace fsdp::detail
