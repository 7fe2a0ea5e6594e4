#pragma once

// The parts of a printed program.

#include <string>

#include "cli/fuzz/case.h"

namespace fsdp::cli::fuzz {

inline std::string dtype_text(c10::ScalarType dtype) {
  return dtype == c10::kDouble  ? "torch::kDouble"
         : dtype == c10::kFloat ? "torch::kFloat"
                                : "torch::kBFloat16";
}

inline std::string bool_text(bool value) {
  return value ? "true" : "false";
}

std::string print_classes(const Case& c);
std::string print_optimizers(const Case& c);
std::string print_steps(const Case& c);

// What follows is the same for every case.

inline constexpr auto kProgramBegin =
    R"PROGRAM(#include <ATen/CPUGeneratorImpl.h>
#include <fsdp/fsdp.h>
#include <torch/torch.h>

thread_local int step = 0;
thread_local int throws_in_forward = -1, throws_in_backward = -1; // the number of a block

torch::Tensor values(std::vector<int64_t> sizes, torch::Dtype dtype, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn(sizes, generator, torch::kDouble).to(dtype);
}

[[maybe_unused]] void throw_in_forward(int block) {
  if (throws_in_forward == block) {
    throws_in_forward = -1;
    throw std::runtime_error("injected");
  }
}

[[maybe_unused]] void throw_in_backward(int block, torch::Tensor& y) {
  if (throws_in_backward == block && y.requires_grad()) {
    y.register_hook([](const torch::Tensor&) {
      if (throws_in_backward >= 0) {
        throws_in_backward = -1;
        throw std::runtime_error("injected");
      }
    });
  }
}

/// What a mixed precision policy does to the parameters of the sharded model.
[[maybe_unused]] torch::Tensor cast(bool plain, const torch::Tensor& t, torch::Dtype dtype) {
  return plain && t.defined() ? t.to(dtype) : t;
}

std::vector<torch::Tensor> unique(const torch::nn::Module& module) {
  std::vector<torch::Tensor> params;
  for (const auto& param : module.parameters()) {
    bool known = false;
    for (const auto& each : params) {
      known = known || each.is_same(param);
    }
    if (!known) {
      params.push_back(param);
    }
  }
  return params;
}

torch::Tensor part_of(const torch::Tensor& whole, const torch::Tensor& param) {
  const auto spread = fsdp::as_dtensor(param);
  const std::vector<fsdp::Placement> replicated(spread.device_mesh().ndim(), fsdp::Replicate{});
  return fsdp::DTensor::from_local(whole, spread.device_mesh(), replicated)
      .redistribute(spread.placements())
      .to_local();
}

void check(const std::string& what, const torch::Tensor& actual, const torch::Tensor& expected) {
  const bool fits =
      actual.sizes() == expected.sizes() && actual.scalar_type() == expected.scalar_type();
  const auto limit = [&] { return kTolerance * (expected.abs().max().item<double>() + 0.1); };
  TORCH_CHECK(
      fits && (actual.numel() == 0 || (actual - expected).abs().max().item<double>() <= limit()),
      what, " in step ", step, " on rank ", fsdp::get_rank(), "\nis ", actual, "\nnot ",
      expected);
}

/// Adds the average over all ranks to `before`.
void average(const std::vector<torch::Tensor>& params, const std::vector<torch::Tensor>& before) {
  for (size_t i = 0; i < params.size(); ++i) {
    auto grad = params[i].grad();
    auto used = torch::full({}, grad.defined() ? 1.0 : 0.0);
    fsdp::default_group().all_reduce(used);
    if (used.item<double>() > 0) {
      grad = grad.defined() ? grad : torch::zeros_like(params[i]);
      fsdp::default_group().all_reduce(grad, fsdp::ReduceOp::Avg);
    }
    if (before[i].defined()) {
      grad = grad.defined() ? before[i] + grad : before[i];
    }
    params[i].mutable_grad() = grad;
  }
}

std::vector<torch::Tensor> take_gradients(const std::vector<torch::Tensor>& params) {
  std::vector<torch::Tensor> grads;
  for (const auto& param : params) {
    grads.push_back(param.grad());
    param.mutable_grad().reset();
  }
  return grads;
}

void compare_gradients(
    const std::vector<torch::Tensor>& params, const std::vector<torch::Tensor>& plain) {
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i].grad().defined() && !plain[i].grad().defined()) {
      plain[i].mutable_grad() = torch::zeros_like(plain[i]); // of an unused parameter
    }
    TORCH_CHECK(
        params[i].grad().defined() == plain[i].grad().defined(), "gradient of parameter ",
        i, " is missing in step ", step);
    if (plain[i].grad().defined()) {
      check(
          c10::str("gradient of parameter ", i), params[i].grad(),
          part_of(plain[i].grad(), params[i]));
    }
  }
}

void compare_parameters(
    const std::vector<torch::Tensor>& params, const std::vector<torch::Tensor>& plain) {
  for (size_t i = 0; i < params.size(); ++i) {
    check(
        c10::str("parameter ", i), fsdp::as_dtensor(params[i]).to_local(),
        part_of(plain[i].detach(), params[i]));
  }
}

/// Saves the shards, changes them, and loads them.
[[maybe_unused]] void save_and_load(fsdp::ModuleRef net, const std::vector<torch::Tensor>& params) {
  fsdp::StateDict saved;
  for (const auto& [key, value] : fsdp::get_model_state_dict(net)) {
    const auto& spread = std::get<fsdp::DTensor>(value);
    saved.insert(
        key, fsdp::DTensor::from_local(
                 spread.to_local().clone(), spread.device_mesh(), spread.placements(),
                 spread.sizes().vec()));
  }
  for (const auto& param : params) {
    const torch::NoGradGuard no_grad;
    fsdp::as_dtensor(param).to_local().mul_(3);
  }
  fsdp::set_model_state_dict(net, saved);
}

template <class F>
[[maybe_unused]] void expect_injected(F call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    if (std::string(error.what()).find("injected") == std::string::npos) {
      throw;
    }
  }
  throws_in_forward = throws_in_backward = -1;
}
)PROGRAM";

inline constexpr auto kCallBoth =
    R"PROGRAM(  const auto call = [&](auto& each, int microbatch, int number, int64_t rows, bool input_grad) {
    auto x = values(
        {rows, kDim}, kDtype, kBatchSeed + 1000 * step + 100 * microbatch + 10 * number + rank);
    x.set_requires_grad(input_grad && torch::GradMode::is_enabled());
    return std::pair(x, each(x));
  };
  const auto loss_of = [](const torch::Tensor& y) { return (y.to(kDtype).pow(2) + 1).sqrt().mean(); };
  const auto backward = [](torch::Tensor loss) {
    if (loss.requires_grad()) {
      loss.backward();
    }
  };
  // Calls both models. Returns their losses.
  const auto call_both = [&](int microbatch, int number, int64_t rows, bool input_grad) {
    const auto [x, y] = call(net, microbatch, number, rows, input_grad);
    const auto [plain_x, plain_y] = call(plain, microbatch, number, rows, input_grad);
    check("output", y.detach(), plain_y.detach());
    return std::pair(loss_of(y), loss_of(plain_y));
  };
  compare_parameters(params, plain_params);
)PROGRAM";

} // namespace fsdp::cli::fuzz
