#include <fsdp/optim.h>

#include <ATen/core/grad_mode.h>

#include "optim/fused_adamw.h"
#include "runtime/range.h"

namespace fsdp::optim {

at::Tensor AdamW::step(LossClosure closure) {
  constexpr auto kName = "fsdp::optim::AdamW";
  using State = torch::optim::AdamWParamState;
  auto loss = detail::loss_of(closure);
  const detail::Range range("optimizer_step");
  at::NoGradGuard no_grad;
  const auto options = [&](std::size_t group) -> const auto& {
    return static_cast<const torch::optim::AdamWOptions&>(param_groups_[group].options());
  };
  detail::FusedAdamW adamw(kName);
  for (const auto& update : detail::find_updates(kName, param_groups_)) {
    auto& slot = state_[update.param.unsafeGetTensorImpl()];
    if (!slot) {
      slot = std::make_unique<State>();
    }
    auto& state = static_cast<State&>(*slot);
    const bool amsgrad = options(update.group).amsgrad();
    adamw.add(
        update, {state.step(), state.exp_avg(), state.exp_avg_sq(),
                 amsgrad ? &state.max_exp_avg_sq() : nullptr});
  }
  adamw.run(options);
  return loss;
}

} // namespace fsdp::optim
