#pragma once

#include <CLI/CLI.hpp>

#include <functional>

namespace fsdp::cli {

/// Runs a command and returns its exit code.
using Action = std::function<int()>;

// Each function adds one command to the tool. Parsing sets `action` if the user chose it.
void add_convert(CLI::App& app, Action& action);
void add_doctor(CLI::App& app, Action& action);
void add_eval(CLI::App& app, Action& action);
void add_export(CLI::App& app, Action& action);
void add_fuzz(CLI::App& app, Action& action);
void add_generate(CLI::App& app, Action& action);
void add_inspect(CLI::App& app, Action& action);
void add_report(CLI::App& app, Action& action);
void add_run(CLI::App& app, Action& action);
void add_tokenize(CLI::App& app, Action& action);
void add_train(CLI::App& app, Action& action);
void add_verify(CLI::App& app, Action& action);

} // namespace fsdp::cli
