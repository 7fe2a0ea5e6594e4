#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/fuzz/case.h"
#include "cli/fuzz/model.h"

namespace fsdp::cli::fuzz {

/// The sharded model and the unsharded one are not the same.
class Difference : public std::runtime_error {
 public:
  /// `kind` is the same for differences of the same sort.
  Difference(std::string kind, const std::string& details)
      : runtime_error(kind + ": " + details), kind(std::move(kind)) {}
  std::string kind;
};

/// What one rank does: trains a sharded model and an unsharded one side by side, and compares them.
/// Every rank has the whole unsharded model, and averages its gradients by hand.
class RankRun {
 public:
  RankRun(const Case& c, int rank);
  /// Throws Difference, or what the library throws.
  void run();
  int64_t num_comparisons() const {
    return num_comparisons_;
  }
  /// The whole parameters of the sharded model by name, as the unsharded model has them.
  std::vector<std::pair<std::string, at::Tensor>> final_parameters() const;

 private:
  struct Calculated {
    at::Tensor input, output, loss;
  };
  void run_step(const Step& step);
  void run_microbatch(const Step& step, int microbatch);
  void happen(const Event& event);
  void fail_in_forward(const Step& step);
  void fail_in_backward(const Step& step);
  void set_up_microbatch(const Step& step, bool last);
  Calculated call(Node& net, const Step& step, int microbatch, int number);
  std::pair<Calculated, Calculated> call_both(const Step& step, int microbatch, int number);
  void average_gradients(const std::vector<at::Tensor>& before);
  void compare_gradients();
  void compare_parameters();
  void compare_wholes(int group);
  void compare_full_state();
  void save_and_load();
  void edit(Action action);
  void thaw(int number, bool frozen);
  void call_around(int number);
  void write_whole(int group);
  at::Tensor part_of(const at::Tensor& whole, const at::Tensor& param) const;
  /// Throws Difference unless the tensors are equal up to rounding.
  void check(
      const char* kind,
      const std::string& name,
      const at::Tensor& actual,
      const at::Tensor& expected,
      double size = 0);

  const Case& case_;
  const int rank_;
  const double tolerance_;
  std::shared_ptr<Situation> situation_, plain_situation_;
  Node net_, plain_;
  std::vector<FSDPModule> groups_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> params_, plain_params_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_, plain_optimizer_;
  std::vector<bool> may_be_zero_; // unused parameters whose gradient is zero, not missing
  int step_ = 0;
  int64_t num_comparisons_ = 0;
};

} // namespace fsdp::cli::fuzz
