#include "cli/train/narrator.h"

#include <c10/util/StringUtil.h>

#include <filesystem>
#include <iostream>

#include "cli/files.h"
#include "cli/invocation.h"
#include "cli/report/report.h"
#include "cli/train/curve.h"
#include "cli/train/plan_activations.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::ordered_json;

std::string traffic_text(const Plan& plan) {
  std::string text;
  for (const auto& kind : plan.traffic) {
    text += (text.empty() ? "" : ", ") + plural(kind.count, kind.op) + " of " +
            binary_size(kind.bytes) + " in all" +
            (kind.axis == "tp"     ? " for tp"
             : kind.axis == "muon" ? " for Muon"
             : kind.axis == "all"  ? " for loss and norm"
                                   : "");
  }
  return text.empty() ? "nothing to send" : text;
}

/// Bytes of the shards of all ranks of a replica together.
int64_t whole_bytes(const Plan& plan, const TrainConfig& config) {
  return plan.num_trained * element_bytes(config.shard_dtype) +
         (plan.num_params - plan.num_trained) * element_bytes(config.frozen_dtype());
}

Json traffic_json(const Plan& plan) {
  auto json = Json::array();
  for (const auto& kind : plan.traffic) {
    json.push_back(
        {{"op", kind.op}, {"axis", kind.axis}, {"count", kind.count}, {"bytes", kind.bytes}});
  }
  return json;
}

Json plan_json(
    const TrainOptions& options,
    const Plan& plan,
    const Fit& fit,
    int64_t shard_bytes,
    const std::string& backend) {
  return {
      {"config", config_json(options)},
      {"backend", backend},
      {"ranks", options.identity.config.mesh.value_or(MeshShape{}).ranks()},
      {"parameters", plan.num_params},
      {"trained_parameters", plan.num_trained},
      {"shard_bytes", shard_bytes},
      {"gathered_bytes", plan.gathered_bytes},
      {"padding_bytes", plan.padding_bytes},
      {"state_bytes", plan.state_bytes},
      {"host_state_bytes", plan.host_state_bytes},
      {"activation_bytes", plan.activation_bytes},
      {"peak_bytes", plan.peak_bytes},
      {"host_bytes", plan.host_bytes},
      {"fits", fit.fits},
      {"traffic", traffic_json(plan)},
      {"groups", groups_json(plan)}};
}

} // namespace

Narrator::Narrator(const TrainOptions& options, bool prints) : options_(options), prints_(prints) {}

void Narrator::print(const char* event, const Json& fields) {
  Json json{{"event", event}};
  json.update(fields);
  std::cout << json.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl;
}

void Narrator::plan(
    const Plan& plan, const Fit& fit, int64_t shard_bytes, const std::string& backend) {
  if (to_programs()) {
    print("plan", plan_json(options_, plan, fit, shard_bytes, backend));
  }
  if (to_people()) {
    show_plan(plan, fit, shard_bytes, backend);
  }
}

void Narrator::show_plan(
    const Plan& plan, const Fit& fit, int64_t shard_bytes, const std::string& backend) {
  const auto& config = options_.identity.config;
  const auto& dims = config.model;
  const auto mesh = config.mesh.value_or(MeshShape{});
  screen_.labelled(
      "model",
      c10::str(
          decimal_count(plan.num_params, ""), " parameters: ", plural(dims.layers, "layer"), " of ",
          dims.dim, ", ", plural(dims.heads, "head"), ", ", dims.kv_heads, " for keys and values, ",
          dims.hidden, " hidden", dims.tied ? ", tied" : "", ", in ", config.param_dtype,
          config.is_low_precision()
              ? c10::str("; kept in ", config.shard_dtype, ", moments in ", config.moments)
              : "",
          config.has_float8() ? "; projections in float8, " + config.float8 : ""));
  if (!config.from.empty()) {
    screen_.labelled("from", printable(config.from));
  }
  if (config.has_lora()) {
    screen_.labelled(
        "lora",
        c10::str(decimal_count(plan.num_trained, ""), " parameters are trained (", dims.lora, ")"));
  }
  screen_.labelled(
      "ranks", c10::str(
                   mesh.ranks(), " over ", backend, "; ", plural(std::ssize(plan.groups), "group"),
                   ", ", binary_size(shard_bytes), " of ", binary_size(whole_bytes(plan, config)),
                   " of parameters on each rank",
                   mesh.replicate > 1 || mesh.tensor > 1 ? "; mesh " + mesh.str() : ""));
  screen_.labelled(
      "memory",
      c10::str(
          "about ", binary_size(plan.peak_bytes), " per rank at the peak: ",
          binary_size(plan.state_bytes), " of shards, gradients and optimizer",
          plan.host_state_bytes > 0
              ? c10::str(" (and ", binary_size(plan.host_state_bytes), " on the host)")
              : "",
          ", ", binary_size(plan.largest_group), " for the largest group, once it is gathered, ",
          binary_size(plan.activation_bytes), " of activations; ", binary_size(plan.padding_bytes),
          " is padding"));
  if (options_.dry_run || !fit.fits) {
    screen_.labelled(fit.fits ? "fits" : "too large", fit.text);
  }
  screen_.labelled("traffic", "per step and rank: " + traffic_text(plan));
  screen_.labelled(
      "run", c10::str(
                 plural(config.steps, "step"), " of ", config.batch, " x ", config.context, " = ",
                 config.batch * config.context, trains_on_bytes() ? " tokens (bytes)" : " tokens",
                 ", seed ", config.seed, config.optimizer == "muon" ? ", by Muon" : ""));
}

void Narrator::text(const Corpus& corpus) {
  const auto size = [&](int64_t count) {
    return corpus.is_bytes() ? decimal_count(count, "B")
           : count < 1000    ? plural(count, "token")
                             : decimal_count(count, "") + " tokens";
  };
  if (to_people()) {
    screen_.labelled(
        "text", c10::str(
                    corpus.name(), ": ", plural(corpus.num_files(), "file"), ", ",
                    size(corpus.num_train()), " to train on and ", size(corpus.num_held_out()),
                    " held out", corpus.shares().empty() ? "" : "; rows: " + corpus.shares()));
  }
}

void Narrator::resumed(const SavedRun& saved, const Lost& lost) {
  if (to_people()) {
    screen_.labelled(
        "resumed", saved.has_checkpoint
                       ? c10::str(
                             saved.path.string(), ": ", plural(saved.step, "step"), " done, by ",
                             plural(saved.ranks, "rank"))
                       : saved.path.string() + ": no checkpoint yet, so it begins again");
    if (lost.steps > 0) {
      screen_.labelled(
          "lost", c10::str(
                      plural(lost.steps, "step"), " since then, made again; ",
                      fixed(lost.seconds, 1), " s"));
    }
  }
  if (to_programs()) {
    print(
        "resumed", {{"checkpoint", saved.path.string()},
                    {"step", saved.step},
                    {"lost_steps", lost.steps},
                    {"lost_seconds", lost.seconds}});
  }
}

void Narrator::begin(int64_t steps_before) {
  const auto& config = options_.identity.config;
  progress_.emplace(screen_, config.steps, config.batch * config.context, steps_before);
}

void Narrator::step(const StepRecord& record) {
  if (to_people()) {
    progress_->update(record);
  }
  if (to_programs()) {
    print("step", to_json(record));
  }
}

void Narrator::validation(const Validation& validation) {
  if (to_people()) {
    screen_.labelled(
        "validated", c10::str("loss ", fixed(validation.loss, 4), " after step ", validation.step));
  }
  if (to_programs()) {
    print("validation", to_json(validation));
  }
}

void Narrator::stopped(const std::string& signal, int64_t step) {
  if (to_people()) {
    screen_.labelled("stopped", c10::str("by ", signal, " after step ", step));
  }
  if (to_programs()) {
    print("stopped", {{"signal", signal}, {"step", step}});
  }
}

void Narrator::curve(const std::vector<double>& losses) {
  if (!to_people()) {
    return;
  }
  const auto lines = draw_curve(losses, {.unicode = has_unicode()});
  if (!lines.empty()) {
    screen_.labelled("losses", "");
  }
  for (const auto& line : lines) {
    screen_.line(line);
  }
}

void Narrator::result(const RunResult& result) {
  if (to_programs()) {
    print(
        "result", {{"steps", result.validation.step},
                   {"first_loss", result.first_loss},
                   {"loss", result.last_loss},
                   {"validation_loss", result.validation.loss},
                   {"byte_frequency_loss", result.validation.byte_frequency_loss},
                   {"seconds", result.seconds}});
  } else if (prints_) { // --quiet too
    screen_.labelled(
        "result", c10::str(
                      "loss ", fixed(result.first_loss, 4), " -> ", fixed(result.last_loss, 4),
                      " (last ", plural(result.num_last, "step"), "), validation loss ",
                      fixed(result.validation.loss, 4), trains_on_bytes() ? " (byte" : " (token",
                      " frequencies alone: ", fixed(result.validation.byte_frequency_loss, 4),
                      "), ", fixed(result.seconds, 1), " s"));
  }
}

void Narrator::sample(const std::string& prompt, const std::string& text) {
  if (to_people()) {
    screen_.labelled("sample", "the model continues \"" + printable(prompt) + "\":");
    screen_.line(printable(text));
  }
  if (to_programs()) {
    print("sample", {{"prompt", prompt}, {"text", text}});
  }
}

void Narrator::saved(const std::string& run, const std::string& checkpoint, int64_t steps) {
  const auto& config = options_.identity.config;
  const bool is_done = steps == config.steps;
  const auto more = is_done ? " --steps " + std::to_string(2 * config.steps) : std::string();
  const auto command = invocation() + " train --resume " + quoted(run) + more;
  if (to_people()) {
    screen_.labelled(
        "saved",
        c10::str(checkpoint, "; ", is_done ? "to train longer: " : "to resume: ", command));
    const std::filesystem::path folder = run;
    const bool has_report = is_file(folder / kReportFile);
    const bool has_timeline = is_file(folder / kTraceFile);
    if (has_report) {
      screen_.labelled(
          "report", (folder / kReportFile).string() +
                        (has_timeline ? c10::str("; timeline: ", kTraceFile, " beside it") : ""));
    } else if (has_timeline) {
      screen_.labelled("timeline", (folder / kTraceFile).string());
    }
  }
  if (to_programs()) {
    print("saved", {{"run", run}, {"checkpoint", checkpoint}, {"resume", command}});
  }
}

} // namespace fsdp::cli
