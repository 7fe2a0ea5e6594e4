#pragma once

#include <fsdp/activation_checkpointing.h>
#include <fsdp/debug.h>

#include "support/sharded.h"

namespace fsdp::test {

/// How blocks are checkpointed: where they are called, around the hooks of
/// fully_shard; or for good, between them.
enum class Flavour : std::uint8_t { None, AtTheCall, ForGood };
inline const std::vector<std::pair<Flavour, std::string>> kFlavours{
    {Flavour::None, "not checkpointed"},
    {Flavour::AtTheCall, "checkpointed at the call"},
    {Flavour::ForGood, "checkpointed for good"}};

inline Transformer make_transformer(
    int64_t layers,
    const ReshardAfterForward& reshard,
    bool weight_tying = true,
    Flavour flavour = Flavour::None) {
  auto net = seeded<Transformer>(ModelArgs{
      .n_layers = layers,
      .dropout_p = 0,
      .weight_tying = weight_tying,
      .checkpoint_activations = flavour == Flavour::AtTheCall});
  for (auto& block : net->blocks) {
    if (flavour == Flavour::ForGood) {
      apply_activation_checkpointing(block);
    }
    fully_shard(block, {.reshard_after_forward = reshard});
  }
  fully_shard(net, {.reshard_after_forward = reshard});
  return net;
}

inline torch::Tensor loss_of(Transformer& net, int step = 0) {
  return net(random_tokens(step, {2, 16}, 8)).sum();
}

using Lines = std::vector<std::string>;

/// "U layers.0 f" for short; the root is "-".
inline Lines short_form(const EventLog& log, const std::string& kinds = "URP") {
  Lines lines;
  for (const auto& event : log.events()) {
    const char kind = "URP"[static_cast<int>(event.kind)];
    if (kinds.find(kind) == std::string::npos) {
      continue;
    }
    std::string line = {kind};
    line += " " + (event.module.empty() ? "-" : event.module);
    if (kind != 'P') {
      line += event.state == TrainingState::Forward       ? " f"
              : event.state == TrainingState::PreBackward ? " b"
                                                          : " p";
    } else {
      EXPECT_EQ(event.state, TrainingState::PostBackward);
    }
    lines.push_back(line);
  }
  return lines;
}

struct Reshard {
  ReshardAfterForward value;
  std::string name;
};
inline const std::vector<Reshard> kReshards{
    {true, "true"}, {false, "false"}, {2, "2"}, {std::nullopt, "auto"}};

/// For as many ranks.
inline std::vector<ReshardAfterForward> reshards(int ranks) {
  return {true, false, ranks % 2 == 0 ? ReshardAfterForward(2) : ReshardAfterForward()};
}

} // namespace fsdp::test
