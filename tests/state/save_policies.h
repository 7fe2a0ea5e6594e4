#pragma once

// Policies of selective activation checkpointing, and what they see.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "module/gradients.h"
#include "state/order_fixture.h"

namespace fsdp::test {

/// Asks another policy, and counts what happens.
class Counting : public SavePolicy {
 public:
  explicit Counting(std::shared_ptr<SavePolicy> inner) : inner_(std::move(inner)) {}
  bool save(const RanOperator& ran) override {
    const bool saved = inner_->save(ran);
    if (saved) {
      live += ran.bytes();
      most = std::max(most, live);
      flops_saved += ran.flops();
    }
    return saved;
  }
  void released(int64_t bytes) override {
    live -= bytes;
    inner_->released(bytes);
  }
  void recomputed(const RanOperator& ran) override {
    ++again[ran.name];
    inner_->recomputed(ran);
  }

  int64_t live = 0;
  int64_t most = 0;
  double flops_saved = 0;
  std::map<std::string, int> again; // how often each operator ran in recomputations

 private:
  const std::shared_ptr<SavePolicy> inner_;
};

class SaveAll : public SavePolicy {
 public:
  bool save(const RanOperator&) override {
    return true;
  }
};

/// Every second result, whatever the operator: a policy with a state of its own.
class SaveEverySecond : public SavePolicy {
 public:
  bool save(const RanOperator&) override {
    return ++asked_ % 2 == 0;
  }

 private:
  int asked_ = 0;
};

using MakePolicy = std::function<std::shared_ptr<SavePolicy>()>;
inline const std::map<std::string, MakePolicy> kPolicies{
    {"matmuls", save_matmuls},
    {"all", [] { return std::make_shared<SaveAll>(); }},
    {"every second", [] { return std::make_shared<SaveEverySecond>(); }},
    {"by name", [] { return save_operators({"aten::mm", "aten::relu", "aten::gelu"}); }},
    {"no byte", [] { return save_within(0); }},
    {"some bytes", [] { return save_within(20000); }},
    {"many bytes", [] { return save_within(1 << 30); }}};

inline ActivationCheckpointOptions saving(std::shared_ptr<SavePolicy> policy) {
  return {.save = std::move(policy)};
}

using Tensors = std::vector<torch::Tensor>;

inline torch::Tensor feed_forward(
    const torch::Tensor& x, const torch::Tensor& up, const torch::Tensor& down) {
  return torch::gelu(x.mm(up)).mm(down).tanh();
}

} // namespace fsdp::test
