// `fsdp report`: makes a page about a training run.
#include <iostream>
#include <memory>
#include <string>

#include "cli/command.h"
#include "cli/report/report.h"

namespace fsdp::cli {

void add_report(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("report", "Make a page about a training run");
  auto run = std::make_shared<std::string>();
  command->add_option("folder", *run, "The run's folder, e.g. runs/<name>")->required();
  command->callback([run, &action] {
    action = [run] {
      std::cout << write_report(*run).string() << std::endl;
      return 0;
    };
  });
}

} // namespace fsdp::cli
