#include <fsdp/save_policy.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "state/kept_results.h"

namespace fsdp {

namespace {

/// How many products of numbers an operator adds up. 0 if it is not of this kind.
double num_products(const RanOperator& ran) {
  const std::string_view name = ran.name;
  const auto argument = [&](size_t i) -> const at::Tensor& {
    return ran.arguments.at(i).toTensor();
  };
  const auto numel = [](const at::Tensor& tensor) { return static_cast<double>(tensor.numel()); };
  const auto size = [](const at::Tensor& tensor, int64_t dim) {
    return static_cast<double>(tensor.size(dim));
  };
  const auto result = [&] { return numel(ran.results.at(0).toTensor()); };
  if (name == "aten::mm" || name == "aten::bmm" || name == "aten::_scaled_mm" ||
      name == "aten::_grouped_mm" || name == "aten::_int_mm") {
    return result() * size(argument(0), -1);
  }
  if (name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::_addmm_activation") {
    return result() * size(argument(1), -1); // the first argument is added
  }
  if (name.starts_with("aten::_scaled_dot_product_")) { // of query, key and value
    return result() * 2 * size(argument(1), -2);
  }
  if (name == "aten::convolution") { // of a weight [out, in, ...], or [in, out, ...] if transposed
    const auto& weight = argument(1);
    const bool transposed = ran.arguments.at(6).toBool();
    return (transposed ? numel(argument(0)) : result()) * numel(weight) / size(weight, 0);
  }
  return 0;
}

bool is_matmul(const RanOperator& ran) {
  return ran.flops() > 0;
}

class SaveOperators : public SavePolicy {
 public:
  explicit SaveOperators(std::vector<std::string> names) : names_(names.begin(), names.end()) {}
  bool save(const RanOperator& ran) override {
    return names_.contains(ran.name);
  }

 private:
  const std::unordered_set<std::string> names_;
};

class SaveMatmuls : public SavePolicy {
 public:
  bool save(const RanOperator& ran) override {
    return is_matmul(ran);
  }
};

class SaveWithin : public SavePolicy {
 public:
  explicit SaveWithin(int64_t budget) : budget_(budget) {}

  bool save(const RanOperator& ran) override {
    if (!is_matmul(ran)) {
      return false;
    }
    const std::lock_guard lock(mutex_);
    if (std::exchange(in_backward_, false)) {
      choose();
    }
    auto& kind = kinds_[{ran.name, ran.index}];
    kind.flops += ran.flops();
    kind.bytes += ran.bytes();
    kind.num_asked += 1;
    if (!kind.chosen || kept_ + ran.bytes() > budget_) {
      return false;
    }
    kind.num_saved += 1;
    kept_ += ran.bytes();
    return true;
  }
  void released(int64_t bytes) override {
    const std::lock_guard lock(mutex_);
    kept_ -= bytes;
  }
  void recomputed(const RanOperator& ran) override {
    if (!is_matmul(ran)) {
      return;
    }
    const std::lock_guard lock(mutex_);
    in_backward_ = true;
    auto& kind = kinds_[{ran.name, ran.index}];
    kind.is_needed = true;
    // If all of them were kept, they ran again because they were written to.
    kind.is_written |= kind.num_asked > 0 && kind.num_saved == kind.num_asked;
  }

 private:
  /// One call of an operator in a module, and in all modules that make the same calls.
  struct Kind {
    bool is_needed = false;  // backward asks for it
    bool is_written = false; // so there is no use in keeping it
    bool chosen = false;
    // These are counted since the last backward.
    double flops = 0;
    int64_t bytes = 0;
    int64_t num_asked = 0;
    int64_t num_saved = 0;
  };

  /// Chooses the kinds that save the most arithmetic per byte, until the budget is used up: by the
  /// bytes of the last forward. The last kind that is chosen may fit in part.
  void choose() {
    std::vector<Kind*> useful;
    for (auto& [_, kind] : kinds_) {
      kind.chosen = false;
      if (kind.is_needed && !kind.is_written && kind.bytes > 0) {
        useful.push_back(&kind);
      }
    }
    std::stable_sort(useful.begin(), useful.end(), [](const Kind* a, const Kind* b) {
      return a->flops / static_cast<double>(a->bytes) > b->flops / static_cast<double>(b->bytes);
    });
    int64_t bytes = 0;
    for (auto* kind : useful) {
      kind->chosen = bytes < budget_;
      bytes += kind->bytes;
    }
    for (auto& [_, kind] : kinds_) {
      kind.flops = 0;
      kind.bytes = kind.num_asked = kind.num_saved = 0;
    }
  }

  const int64_t budget_;
  std::mutex mutex_; // backward may run in other threads
  int64_t kept_ = 0;
  bool in_backward_ = false;
  std::map<std::pair<std::string, size_t>, Kind> kinds_; // by operator and number of the call
};

} // namespace

int64_t RanOperator::bytes() const {
  int64_t bytes = 0;
  detail::for_each_tensor(results, [&](const at::Tensor& tensor) {
    bytes += tensor.has_storage() ? static_cast<int64_t>(tensor.nbytes()) : 0;
  });
  return bytes;
}

double RanOperator::flops() const {
  return 2 * num_products(*this);
}

std::shared_ptr<SavePolicy> save_operators(std::vector<std::string> names) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : names) {
    bool exists = false;
    bool can_keep = false;
    for (const auto& each : dispatcher.getAllOpNames()) { // with all overloads
      if (each.name == name) {
        const auto op = dispatcher.findSchema(each);
        exists |= op.has_value();
        can_keep |= op && detail::can_keep_results(*op);
      }
    }
    TORCH_CHECK_VALUE(
        exists, "[save_operators] there is no operator '", name,
        "'; names are like aten::mm, without an overload");
    TORCH_CHECK_VALUE(
        can_keep, "[save_operators] ", name,
        " has no results to keep: it consists of other operators, writes to an argument, returns a "
        "view, draws random numbers or chooses a device. Name what it consists of (a linear layer "
        "runs aten::addmm or aten::mm, an attention one of aten::_scaled_dot_product_...), or use "
        "save_matmuls()");
  }
  return std::make_shared<SaveOperators>(std::move(names));
}

std::shared_ptr<SavePolicy> save_matmuls() {
  return std::make_shared<SaveMatmuls>();
}

std::shared_ptr<SavePolicy> save_within(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "[save_within] a budget of ", bytes, " bytes is negative");
  return std::make_shared<SaveWithin>(bytes);
}

} // namespace fsdp
