#pragma once

namespace fsdp::cli {

/// Calls `visit(name, member)` for each option that config.json holds and checkpoints do not.
/// --save-every is one, too, but has another type.
template <class Visit>
void for_each_folder_option(Visit visit) {
  visit("reshard-after-forward", [](auto& options) -> auto& { return options.reshard; });
  visit("device", [](auto& options) -> auto& { return options.device; });
  visit("token-dtype", [](auto& options) -> auto& { return options.token_dtype; });
  visit("processes", [](auto& options) -> auto& { return options.processes; });
  visit("validate-every", [](auto& options) -> auto& { return options.validate_every; });
  visit("keep", [](auto& options) -> auto& { return options.keep.keep; });
  visit("keep-every", [](auto& options) -> auto& { return options.keep.keep_every; });
  visit("peak-tflops", [](auto& options) -> auto& { return options.peak_tflops; });
  visit("csv", [](auto& options) -> auto& { return options.csv; });
  visit("tensorboard", [](auto& options) -> auto& { return options.tensorboard; });
}

} // namespace fsdp::cli
