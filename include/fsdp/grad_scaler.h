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
  /// The scale grows by this after `growth_interval` steps in a row without an
  /// infinite or NaN gradient, and is multiplied by `backoff_factor` after one.
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  /// False: `scale` returns its argument, `step` steps, the rest does nothing.
  bool enabled = true;
};

/// torch.amp.GradScaler for sharded parameters: keeps fp16 gradients in range by
/// scaling the loss, and skips steps whose gradients are not finite; on every
/// rank, if they are not on one. In each iteration:
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

  /// The loss times the scale, which lives on the device of the first loss.
  at::Tensor scale(const at::Tensor& loss);

  /// Divides the gradients of the optimizer's parameters by the scale, and finds
  /// out whether all are finite: one all-reduce per process group that shards
  /// some of them, so every rank must call it. Once per optimizer and iteration.
  /// Throws ValueError, before anything changes, for fp16 or sparse gradients.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Unscales, if that was not done, and steps if all gradients are finite;
  /// returns whether it did. Waits for the device. Collective as `unscale_`.
  bool step(torch::optim::Optimizer& optimizer);

  /// Ends an iteration: adapts the scale, or sets it.
  void update(std::optional<double> new_scale = std::nullopt);

  /// Waits for the device. 1 if disabled.
  double get_scale() const;
  bool is_enabled() const {
    return options_.enabled;
  }

  /// To be saved after `update`. That of a disabled scaler is zeros, and cannot
  /// be loaded by one that is enabled.
  struct State {
    double scale = 0;
    int64_t growth_tracker = 0; // steps since the scale changed
  };
  State state() const;
  void load_state(const State& state);

 private:
  enum class Stage : std::uint8_t { Unscaled, Stepped };
  /// An optimizer in this iteration; one that is not known is ready.
  struct Progress {
    Stage stage = Stage::Unscaled;
    at::Tensor found_inf; // 1D, one element; the same on every rank
  };

  void check_scale(const char* function) const;

  GradScalerOptions options_;
  State initial_;             // until there are tensors
  at::Tensor scale_;          // 0D
  at::Tensor growth_tracker_; // 0D
  std::unordered_map<const torch::optim::Optimizer*, Progress> optimizers_;
};

} // namespace fsdp
