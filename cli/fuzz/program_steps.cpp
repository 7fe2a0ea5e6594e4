// The part of a printed program that trains.
#include <c10/util/StringUtil.h>

#include <sstream>

#include "cli/fuzz/case.h"
#include "cli/fuzz/program_parts.h"

namespace fsdp::cli::fuzz {

namespace {

std::string optimizer_text(const Case& c, bool sharded) {
  const auto sgd = "torch::optim::SGDOptions(0.02).momentum(0.9).weight_decay(0.01)";
  const auto adamw = "torch::optim::AdamWOptions(0.01).eps(1e-2)";
  const auto params = sharded ? "params" : "plain_params";
  const auto made = [&](const char* type, const char* options) {
    return c10::str(type, "(", params, ", ", options, ")");
  };
  switch (c.optimizer) {
    case Optimizer::Sgd:
      return made("torch::optim::SGD", sgd);
    case Optimizer::Adam:
      return made("torch::optim::Adam", "torch::optim::AdamOptions(0.01).eps(1e-2)");
    case Optimizer::AdamW:
      return made("torch::optim::AdamW", adamw);
    case Optimizer::FsdpSgd:
      return made(sharded ? "fsdp::optim::SGD" : "torch::optim::SGD", sgd);
    case Optimizer::FsdpAdamW:
      return made(sharded ? "fsdp::optim::AdamW" : "torch::optim::AdamW", adamw);
  }
  return "";
}

/// "net->b0->b1" of a block's number.
std::string path_of(const Block& root, int number) {
  std::string found;
  int at = 0;
  const std::function<void(const Block&, const std::string&)> look = [&](const Block& block,
                                                                         const std::string& path) {
    if (at++ == number) {
      found = path;
    }
    for (size_t i = 0; i < block.blocks.size(); ++i) {
      look(block.blocks[i], c10::str(path, "->b", i));
    }
  };
  look(root, "");
  return found;
}

class Steps {
 public:
  explicit Steps(const Case& c) : case_(c) {}

  std::string print() {
    out_ << kCallBoth;
    for (size_t i = 0; i < case_.steps.size(); ++i) {
      print(case_.steps[i], static_cast<int>(i));
    }
    return out_.str();
  }

 private:
  template <class... Pieces>
  void line(const Pieces&... pieces) {
    out_ << "    " << c10::str(pieces...) << "\n";
  }

  static std::string call(const Step& step, int microbatch, int number) {
    return c10::str(
        "(", microbatch, ", ", number, ", ", step.rows, ", ", step.input_grad ? "true" : "false",
        ")");
  }

  void print(const Step& step, int number) {
    out_ << "  {\n";
    line("step = ", number, ";");
    line("const auto before = take_gradients(plain_params);");
    for (int i = 0; i < step.microbatches; ++i) {
      for (const auto& event : step.events) {
        if (event.microbatch == i) {
          print(step, event);
        }
      }
      if (i == 0) {
        print_failures(step);
      }
      print_microbatch(step, i);
    }
    for (size_t i = 0; i < case_.groups.size(); ++i) {
      line("group", i, ".reshard();");
    }
    line("average(plain_params, before);");
    if (case_.tamper != 1) {
      line("params[0].grad().mul_(", case_.tamper, ");");
    }
    line("compare_gradients(params, plain_params);");
    if (step.clip) {
      line("fsdp::clip_grad_norm_(params, 0.05);");
      line("torch::nn::utils::clip_grad_norm_(plain_params, 0.05);");
    }
    if (step.update) {
      line("optimizer.step();");
      line("plain_optimizer.step();");
    }
    if (step.zero != Zero::Never) {
      const auto none = step.zero == Zero::ToNone ? "true" : "false";
      line("optimizer.zero_grad(", none, ");");
      line("plain_optimizer.zero_grad(", none, ");");
    }
    line("compare_parameters(params, plain_params);");
    out_ << "  }\n";
  }

  void print_failures(const Step& step) {
    if (step.throws_in_forward >= 0) {
      line("throws_in_forward = ", step.throws_in_forward, ";");
      line(
          "expect_injected([&] { call(net, 9, 0, ", step.rows, ", ",
          step.input_grad ? "true" : "false", "); });");
    }
    if (step.throws_in_backward >= 0) {
      print_settings(step, /*last=*/true);
      line("throws_in_backward = ", step.throws_in_backward, ";");
      line(
          "expect_injected([&] { backward(loss_of(call(net, 9, 0, ", step.rows, ", ",
          step.input_grad ? "true" : "false", ").second)); });");
      line("optimizer.zero_grad(true);");
    }
  }

  void print_settings(const Step& step, bool last) {
    const auto set = [&](bool differs, const char* setter) {
      if (differs) {
        line("group0.", setter, "(", last ? "true" : "false", ");");
      }
    };
    set(step.sync == Sync::Last, "set_requires_gradient_sync");
    set(step.sync == Sync::LastOverReplicas, "set_requires_all_reduce");
    set(step.keep, "set_reshard_after_backward");
    set(step.mark_last, "set_is_last_backward");
  }

  void print_microbatch(const Step& step, int i) {
    print_settings(step, i == step.microbatches - 1);
    const auto name = c10::str("losses", i);
    line("const auto ", name, " = call_both", call(step, i, 0), ";");
    const auto backward = [&](const std::string& loss) {
      line("backward(", loss, ".first);");
      line("backward(", loss, ".second);");
    };
    if (step.calls == Calls::One) {
      backward(name);
      return;
    }
    const auto other = c10::str("more_losses", i);
    line("const auto ", other, " = call_both", call(step, i, 1), ";");
    if (step.calls == Calls::SumOfTwo) {
      line("backward(", name, ".first + ", other, ".first);");
      line("backward(", name, ".second + ", other, ".second);");
    } else {
      backward(step.calls == Calls::TwoInOrder ? name : other);
      backward(step.calls == Calls::TwoInOrder ? other : name);
    }
  }

  void print(const Step& step, const Event& event) {
    const auto group = c10::str("group", event.target);
    switch (event.action) {
      case Action::Evaluate:
        line(
            "{ const torch::NoGradGuard no_grad; call_both", call(step, event.microbatch, 2),
            "; }");
        break;
      case Action::Abandon:
        line("call_both", call(step, event.microbatch, 3), ";");
        break;
      case Action::Unshard:
        line(group, ".unshard();");
        break;
      case Action::UnshardAsync:
        line("(void)", group, ".unshard(/*async_op=*/true);");
        break;
      case Action::UnshardReshard:
        line(group, ".unshard();");
        line(group, ".reshard();");
        break;
      case Action::Reshard:
        line(group, ".reshard();");
        break;
      case Action::ShardedState:
        line("save_and_load(net, params);");
        break;
      case Action::FullState:
        line("fsdp::get_model_state_dict(net, {.full_state_dict = true});");
        break;
      case Action::EditShards:
        edit("fsdp::as_dtensor(param).to_local()");
        break;
      case Action::EditParameters:
        edit("param");
        break;
      case Action::EditData:
        edit("param.data()");
        break;
      case Action::CallAround:
        line(
            "try { net", path_of(case_.root, event.target), "->as<",
            c10::str(event.target == 0 ? "Net" : c10::str("Block", event.target)),
            "Impl>()->forward(torch::ones({2, kDim}, kDtype)); } catch (const c10::Error&) {}");
        break;
      case Action::WriteWhole:
        line(group, ".unshard();");
        line(
            "for (const auto& param : params) { const torch::NoGradGuard no_grad; if "
            "(param.sizes() == fsdp::as_dtensor(param).sizes()) param.add_(1); }");
        line("try { ", group, ".reshard(); } catch (const c10::Error&) {}");
        line(group, ".reshard();");
        break;
      case Action::SetReshard:
        line(group, ".set_reshard_after_forward(", event.value ? "true" : "false", ", false);");
        break;
      case Action::Thaw:
        for (const auto* net : {"net", "plain"}) {
          line(
              "for (auto& param : ", net, path_of(case_.root, event.target),
              "->parameters(false)) param.set_requires_grad(", event.value ? "false" : "true",
              ");");
        }
        break;
    }
  }

  void edit(const char* target) {
    line("{");
    line("  const torch::NoGradGuard no_grad;");
    line("  for (const auto& param : params) ", target, ".mul_(0.5);");
    line("  for (const auto& param : plain_params) param.mul_(0.5);");
    line("}");
  }

  const Case& case_;
  std::ostringstream out_;
};

} // namespace

std::string print_optimizers(const Case& c) {
  return c10::str(
      "  const auto params = unique(*net), plain_params = unique(*plain);\n  auto optimizer = ",
      optimizer_text(c, true), ";\n  auto plain_optimizer = ", optimizer_text(c, false), ";\n");
}

std::string print_steps(const Case& c) {
  return Steps(c).print();
}

} // namespace fsdp::cli::fuzz
