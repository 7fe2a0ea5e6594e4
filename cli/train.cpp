#include <iostream>

#include "cli/command.h"

namespace fsdp::cli {

void add_train(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("train", "Train a model (not there yet)");
  command->allow_extras();
  command->callback([&action] {
    action = [] {
      std::cerr << "fsdp: train does not exist yet; this version has the foundations: ranks, "
                   "meshes, sharded tensors and `fsdp run`\n";
      return 1;
    };
  });
}

} // namespace fsdp::cli
