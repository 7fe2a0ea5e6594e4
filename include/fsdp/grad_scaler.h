#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <unordered_map>

#include <fsdp/export.h>

namespace torch::optim {
class Optimizer;
}

namespace fsdp {

struct GradScalerOptions {
  double init_scale = 65536;
  /// The scale is multiplied by `growth_factor` after `growth_interval` steps in a row without an
  /// infinite or NaN gradient, and by `backoff_factor` after a step with one.
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  /// False: `scale` returns its argument, `step` always steps, and the other functions do
  /// nothing.
  bool enabled = true;
};

/// torch.amp.GradScaler for sharded parameters. It scales the loss to keep fp16 gradients in
/// range, and skips steps whose gradients are not finite. If the gradients of one rank are not
/// finite, all ranks skip the step. In each iteration:
///
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer); // if the gradients are to be clipped
///     scaler.step(optimizer);
///     scaler.update();
class FSDP_API GradScaler {
 public:
  explicit GradScaler(const GradScalerOptions& options = {});
  GradScaler(GradScaler&&) = default;
  GradScaler& operator=(GradScaler&&) = default;

  /// Returns the loss times the scale. The scale is kept on the device of the first loss.
  at::Tensor scale(const at::Tensor& loss);

  /// Divides the gradients of the optimizer's parameters by the scale, and finds out whether all
  /// of them are finite. May be called once per optimizer and iteration. Throws ValueError for
  /// fp16 or sparse gradients, before anything changes. Collective: makes one all-reduce per
  /// process group that shards or replicates some of the parameters.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Unscales the gradients if `unscale_` was not called, and steps if all of them are finite.
  /// Returns whether it stepped. Waits for the device. Collective like `unscale_`.
  bool step(torch::optim::Optimizer& optimizer);

  /// Ends an iteration: adapts the scale, or sets it to `new_scale`.
  void update(std::optional<double> new_scale = std::nullopt);

  /// Waits for the device. Returns 1 if the scaler is disabled.
  double get_scale() const;
  bool is_enabled() const {
    return options_.enabled;
  }

  /// The state to save in a checkpoint, after `update`. The state of a disabled scaler is
  /// all zeros, and an enabled scaler refuses it.
  struct State {
    double scale = 0;
    int64_t growth_tracker = 0; // finite steps in a row since the last growth or skip
  };
  State state() const;
  void load_state(const State& state);

 private:
  enum class Stage : std::uint8_t { Unscaled, Stepped };
  /// The progress of an optimizer in this iteration. An optimizer without an entry is not unscaled
  /// yet.
  struct Progress {
    Stage stage = Stage::Unscaled;
    at::Tensor found_inf; // 1D, one element; the same on every rank
  };

  void check_scale(const char* function) const;

  GradScalerOptions options_;
  State initial_;             // used until the tensors below exist
  at::Tensor scale_;          // 0D
  at::Tensor growth_tracker_; // 0D
  std::unordered_map<const torch::optim::Optimizer*, Progress> optimizers_;
};

} // namespace fsdp
