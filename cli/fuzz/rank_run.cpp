#include "cli/fuzz/rank_run.h"

#include <torch/torch.h>

#include <algorithm>

#include <fsdp/clip_grad_norm.h>
#include <fsdp/distributed.h>
#include <fsdp/param.h>

namespace fsdp::cli::fuzz {

namespace {

constexpr double kMaxNorm = 0.05;

template <class F>
void expect_injected(Situation& situation, F call) {
  try {
    call();
  } catch (const std::exception& error) {
    if (std::string(error.what()).find(Injected().what()) == std::string::npos) {
      throw;
    }
  }
  situation.throws_in_forward = situation.throws_in_backward = -1; // its block may not run
}

} // namespace

RankRun::RankRun(const Case& c, int rank)
    : case_(c),
      rank_(rank),
      tolerance_(tolerance(c)),
      situation_(std::make_shared<Situation>()),
      plain_situation_(std::make_shared<Situation>()),
      net_(make_model(c, situation_)),
      plain_(make_model(c, plain_situation_)) {
  situation_->rank = plain_situation_->rank = rank;
  if (c.optimizer_first) {
    optimizer_ = make_optimizer(c, *net_, /*sharded=*/true);
  }
  groups_ = shard_model(c, net_);
  follow_policies(c, plain_);
  if (!optimizer_) {
    optimizer_ = make_optimizer(c, *net_, /*sharded=*/true);
  }
  plain_optimizer_ = make_optimizer(c, *plain_, /*sharded=*/false);
  params_ = unique_parameters(*net_);
  plain_params_ = unique_parameters(*plain_);
  const auto named = net_->named_parameters();
  for (const auto& param : params_) {
    for (const auto& item : named) {
      if (item.value().is_same(param)) {
        names_.push_back(item.key());
        break;
      }
    }
    bool may_be_zero = false;
    for (auto* node : all_nodes(net_)) {
      for (const auto& own : node->parameters(/*recurse=*/false)) {
        may_be_zero |= own.is_same(param) && c.groups[node->block.group].reduce_unused;
      }
    }
    may_be_zero_.push_back(may_be_zero);
  }
}

void RankRun::run() {
  compare_parameters();
  for (const auto& step : case_.steps) {
    run_step(step);
    ++step_;
  }
}

std::vector<std::pair<std::string, at::Tensor>> RankRun::final_parameters() const {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (size_t i = 0; i < params_.size(); ++i) {
    result.emplace_back(names_[i], as_dtensor(params_[i]).full_tensor());
  }
  return result;
}

// ------------------------------------------------------------ A step

void RankRun::run_step(const Step& step) {
  situation_->step = plain_situation_->step = step_;
  std::vector<at::Tensor> before;
  for (auto& param : plain_params_) {
    before.push_back(param.grad());
    param.mutable_grad().reset();
  }
  for (int microbatch = 0; microbatch < step.microbatches; ++microbatch) {
    for (const auto& event : step.events) {
      if (event.microbatch == microbatch) {
        happen(event);
      }
    }
    if (microbatch == 0) {
      fail_in_forward(step);
      fail_in_backward(step);
    }
    run_microbatch(step, microbatch);
  }
  for (auto& group : groups_) {
    group.reshard(); // an event may have unsharded it, and no forward used it
  }
  average_gradients(before);
  if (case_.tamper != 1) {
    for (const auto& param : params_) {
      if (param.grad().defined()) {
        param.grad().mul_(case_.tamper);
        break;
      }
    }
  }
  compare_gradients();
  if (step.clip) {
    const auto norm = clip_grad_norm_(params_, kMaxNorm);
    const auto expected = torch::nn::utils::clip_grad_norm_(plain_params_, kMaxNorm);
    check("the norm of gradients differs", "norm", norm, torch::full_like(norm, expected));
  }
  if (step.update) {
    optimizer_->step();
    plain_optimizer_->step();
  }
  if (step.zero != Zero::Never) {
    optimizer_->zero_grad(step.zero == Zero::ToNone);
    plain_optimizer_->zero_grad(step.zero == Zero::ToNone);
  }
  compare_parameters();
}

void RankRun::set_up_microbatch(const Step& step, bool last) {
  auto& root = groups_[0];
  root.set_requires_gradient_sync(last || step.sync != Sync::Last);
  root.set_requires_all_reduce(last || step.sync != Sync::LastOverReplicas);
  root.set_reshard_after_backward(last || !step.keep);
  root.set_is_last_backward(last || !step.mark_last);
}

RankRun::Calculated RankRun::call(Node& net, const Step& step, int microbatch, int number) {
  auto input = seeded_randn(
      {step.rows, case_.dim}, case_.dtype, batch_seed(case_, step_, microbatch, number, rank_));
  input.set_requires_grad(step.input_grad && at::GradMode::is_enabled());
  const auto output = net(input);
  return {input, output, loss_of(output, case_.dtype)};
}

std::pair<RankRun::Calculated, RankRun::Calculated> RankRun::call_both(
    const Step& step, int microbatch, int number) {
  situation_->records = plain_situation_->records = true;
  const auto actual = call(net_, step, microbatch, number);
  const auto expected = call(plain_, step, microbatch, number);
  situation_->records = plain_situation_->records = false;
  check("the outputs differ", "output", actual.output.detach(), expected.output.detach());
  if (situation_->dtypes != plain_situation_->dtypes) {
    throw Difference("the dtypes of inputs differ", c10::str("in step ", step_));
  }
  situation_->dtypes.clear();
  plain_situation_->dtypes.clear();
  return {actual, expected};
}

void RankRun::run_microbatch(const Step& step, int microbatch) {
  set_up_microbatch(step, microbatch == step.microbatches - 1);
  auto first = call_both(step, microbatch, 0);
  std::vector<std::pair<Calculated, Calculated>> calls{first};
  if (step.calls != Calls::One) {
    calls.push_back(call_both(step, microbatch, 1));
  }
  if (step.calls == Calls::SumOfTwo) {
    calls[0].first.loss = calls[0].first.loss + calls[1].first.loss;
    calls[0].second.loss = calls[0].second.loss + calls[1].second.loss;
  }
  if (step.calls == Calls::TwoReversed) {
    std::swap(calls[0], calls[1]);
  }
  for (size_t i = 0; i < calls.size() && !(i == 1 && step.calls == Calls::SumOfTwo); ++i) {
    for (auto* calculated : {&calls[i].first, &calls[i].second}) {
      if (calculated->loss.requires_grad()) {
        calculated->loss.backward();
      }
    }
  }
  for (const auto& [actual, expected] : calls) {
    if (expected.input.grad().defined()) {
      check(
          "the gradients of inputs differ", "input", actual.input.grad(), expected.input.grad(),
          /*size=*/0.1);
    }
  }
}

void RankRun::fail_in_forward(const Step& step) {
  if (step.throws_in_forward >= 0) {
    situation_->throws_in_forward = step.throws_in_forward;
    expect_injected(*situation_, [&] { call(net_, step, 9, 0); });
  }
}

void RankRun::fail_in_backward(const Step& step) {
  if (step.throws_in_backward >= 0) {
    set_up_microbatch(step, /*last=*/true);
    situation_->throws_in_backward = step.throws_in_backward;
    expect_injected(*situation_, [&] {
      auto loss = call(net_, step, 9, 0).loss;
      if (loss.requires_grad()) {
        loss.backward();
      }
    });
    optimizer_->zero_grad(/*set_to_none=*/true);
  }
}

} // namespace fsdp::cli::fuzz
