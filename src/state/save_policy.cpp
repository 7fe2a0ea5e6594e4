#include <fsdp/save_policy.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "state/kept_results.h"

namespace fsdp {

namespace {

const at::Tensor& tensor_at(c10::ArrayRef<c10::IValue> values, size_t i) {
  return values.at(i).toTensor();
}

/// How many products of numbers are added up for each number in the result. 0 if the operator is
/// not of this kind.
double terms_per_result(std::string_view name, c10::ArrayRef<c10::IValue> arguments) {
  const auto last_size = [&](size_t i) {
    return static_cast<double>(tensor_at(arguments, i).size(-1));
  };
  if (name == "aten::mm" || name == "aten::bmm" || name == "aten::_scaled_mm" ||
      name == "aten::_grouped_mm" || name == "aten::_int_mm") {
    return last_size(0);
  }
  if (name == "aten::addmm" || name == "aten::baddbmm") { // the first argument is added
    return last_size(1);
  }
  if (name.starts_with("aten::_scaled_dot_product_")) { // query, key: one product each with k and v
    return 2 * static_cast<double>(tensor_at(arguments, 1).size(-2));
  }
  if (name == "aten::convolution") { // of a weight [out, in, ...], or [in, out, ...] if transposed
    const auto& weight = tensor_at(arguments, 1);
    return static_cast<double>(weight.numel()) / static_cast<double>(weight.size(0));
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

/// Which call of which operator, in modules of one kind: they make the same calls with results of
/// the same size.
using CallKey = std::tuple<std::string, size_t, int64_t>;

class SaveWithin : public SavePolicy {
 public:
  explicit SaveWithin(int64_t budget) : budget_(budget) {}

  bool save(const RanOperator& ran) override {
    if (!is_matmul(ran)) {
      return false;
    }
    const std::lock_guard lock(mutex_);
    if (std::exchange(seen_more_, false)) {
      choose();
    }
    if (!chosen_.contains(key_of(ran)) || kept_ + ran.bytes() > budget_) {
      return false;
    }
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
    auto& seen = seen_[key_of(ran)];
    if (seen.chosen_before) { // it did not fit, or backward ran twice
      return;
    }
    seen.flops_per_byte = ran.flops() / static_cast<double>(ran.bytes());
    seen.bytes += ran.bytes();
    seen_more_ = true;
  }

 private:
  struct Seen {
    double flops_per_byte = 0;
    int64_t bytes = 0; // of all calls with this key in the first step
    bool chosen_before = false;
  };

  static CallKey key_of(const RanOperator& ran) {
    return {ran.name, ran.index, ran.bytes()};
  }

  /// Chooses the calls that save the most arithmetic per byte, until the budget is used up. The
  /// last kind that is chosen may fit in part.
  void choose() {
    std::vector<std::pair<CallKey, Seen*>> by_value;
    for (auto& [key, seen] : seen_) {
      seen.chosen_before = true;
      by_value.emplace_back(key, &seen);
    }
    std::stable_sort(by_value.begin(), by_value.end(), [](const auto& a, const auto& b) {
      return a.second->flops_per_byte > b.second->flops_per_byte;
    });
    chosen_.clear();
    int64_t bytes = 0;
    for (const auto& [key, seen] : by_value) {
      if (bytes >= budget_) {
        break;
      }
      chosen_.insert(key);
      bytes += seen->bytes;
    }
  }

  const int64_t budget_;
  std::mutex mutex_; // backward may run in other threads
  int64_t kept_ = 0;
  bool seen_more_ = false;
  std::map<CallKey, Seen> seen_;
  std::set<CallKey> chosen_;
};

} // namespace

int64_t RanOperator::bytes() const {
  int64_t bytes = 0;
  for (const auto& result : results) {
    if (result.isTensor() && result.toTensor().defined()) {
      bytes += static_cast<int64_t>(result.toTensor().nbytes());
    } else if (result.isTensorList()) {
      for (const at::Tensor& each : result.toTensorVector()) {
        bytes += static_cast<int64_t>(each.nbytes());
      }
    }
  }
  return bytes;
}

double RanOperator::flops() const {
  const auto terms = terms_per_result(name, arguments);
  return terms == 0 ? 0 : 2 * terms * static_cast<double>(tensor_at(results, 0).numel());
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
        " has no results to keep: it consists of other operators, writes to an argument or returns "
        "a view. Name what it consists of (a linear layer runs aten::addmm or aten::mm, an "
        "attention one of aten::_scaled_dot_product_...), or use save_matmuls()");
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
