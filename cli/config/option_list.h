#pragma once

namespace fsdp::cli {

/// Calls `visit(name, member, fixed)` for each option that --model decides; see `for_each_option`.
template <class Visit>
void for_each_model_option(const Visit& visit) {
  visit("vocab", [](auto& config) -> auto& { return config.model.vocab; }, /*fixed=*/true);
  visit("dim", [](auto& config) -> auto& { return config.model.dim; }, true);
  visit("layers", [](auto& config) -> auto& { return config.model.layers; }, true);
  visit("heads", [](auto& config) -> auto& { return config.model.heads; }, true);
  visit("kv-heads", [](auto& config) -> auto& { return config.model.kv_heads; }, true);
  visit("hidden", [](auto& config) -> auto& { return config.model.hidden; }, true);
  visit("tied", [](auto& config) -> auto& { return config.model.tied; }, true);
  visit("rotary-base", [](auto& config) -> auto& { return config.model.rotary_base; }, true);
  visit("norm-eps", [](auto& config) -> auto& { return config.model.norm_eps; }, true);
  visit("head-dim", [](auto& config) -> auto& { return config.model.head_size; }, true);
  visit("qkv-bias", [](auto& config) -> auto& { return config.model.qkv_bias; }, true);
  visit("o-bias", [](auto& config) -> auto& { return config.model.o_bias; }, true);
  visit("mlp-bias", [](auto& config) -> auto& { return config.model.mlp_bias; }, true);
  visit("qk-norm", [](auto& config) -> auto& { return config.model.qk_norm; }, true);
  visit("window", [](auto& config) -> auto& { return config.model.window; }, true);
  visit("window-from", [](auto& config) -> auto& { return config.model.window_from; }, true);
  visit("full-every", [](auto& config) -> auto& { return config.model.full_every; }, true);
  visit(
      "window-rotary-base", [](auto& config) -> auto& { return config.model.window_rotary_base; },
      true);
  visit("rotary-scaling", [](auto& config) -> auto& { return config.model.rotary_scaling; }, true);
  visit("gemma", [](auto& config) -> auto& { return config.model.gemma; }, true);
  visit("sandwich-norms", [](auto& config) -> auto& { return config.model.sandwich_norms; }, true);
  visit("attention-size", [](auto& config) -> auto& { return config.model.attention_size; }, true);
  visit("attention-cap", [](auto& config) -> auto& { return config.model.attention_cap; }, true);
  visit("score-cap", [](auto& config) -> auto& { return config.model.score_cap; }, true);
}

/// Calls `visit(name, member, fixed)` for each option that decides the result of a run.
/// `member(config)` is the option's value in a TrainConfig. A `fixed` option cannot change when a
/// run is resumed. Checkpoints hold all of these options; config.json leaves out automatic values.
template <class Visit>
void for_each_option(Visit visit) {
  for_each_model_option(visit);
  visit("lora", [](auto& config) -> auto& { return config.model.lora; }, true);
  visit("from", [](auto& config) -> auto& { return config.from; }, true);
  visit("context", [](auto& config) -> auto& { return config.context; }, true);
  visit("document-end", [](auto& config) -> auto& { return config.document_end; }, true);
  visit("batch", [](auto& config) -> auto& { return config.batch; }, true);
  visit("seed", [](auto& config) -> auto& { return config.seed; }, true);
  visit("steps", [](auto& config) -> auto& { return config.steps; }, false);
  visit("lr", [](auto& config) -> auto& { return config.schedule.lr; }, false);
  visit("min-lr", [](auto& config) -> auto& { return config.schedule.min_lr; }, false);
  visit("warmup", [](auto& config) -> auto& { return config.schedule.warmup; }, false);
  visit("schedule", [](auto& config) -> auto& { return config.schedule.kind; }, false);
  visit("optimizer", [](auto& config) -> auto& { return config.optimizer; }, true);
  visit("weight-decay", [](auto& config) -> auto& { return config.weight_decay; }, false);
  visit("beta1", [](auto& config) -> auto& { return config.beta1; }, false);
  visit("beta2", [](auto& config) -> auto& { return config.beta2; }, false);
  visit("clip", [](auto& config) -> auto& { return config.clip; }, false);
  visit("accumulate", [](auto& config) -> auto& { return config.accumulate; }, false);
  // Fixed, because only checkpoints of fp16 hold the state of the gradient scaler.
  visit("param-dtype", [](auto& config) -> auto& { return config.param_dtype; }, true);
  visit("float8", [](auto& config) -> auto& { return config.float8; }, false);
  visit("reduce-dtype", [](auto& config) -> auto& { return config.reduce_dtype; }, false);
  visit("send-dtype", [](auto& config) -> auto& { return config.send_dtype; }, false);
  visit("shard-dtype", [](auto& config) -> auto& { return config.shard_dtype; }, true);
  visit("moments", [](auto& config) -> auto& { return config.moments; }, true);
  visit("rounding", [](auto& config) -> auto& { return config.rounding; }, true);
  visit("offload", [](auto& config) -> auto& { return config.offload; }, false);
  visit("device-budget", [](auto& config) -> auto& { return config.device_budget; }, false);
  visit("step-in-backward", [](auto& config) -> auto& { return config.step_in_backward; }, false);
  visit(
      "activation-checkpointing",
      [](auto& config) -> auto& { return config.activation_checkpointing; }, false);
  visit("keep-matmuls", [](auto& config) -> auto& { return config.keep_matmuls; }, false);
}

} // namespace fsdp::cli
