// `./fsdp bench gpu` compares our FSDP with Python's FSDP2 in one run: one rank of a fake world
// of eight on a GPU. There are three cases of transformer and batch, each in four forms. Each
// form is a process of its own; the forms take turns, and only one works at a time:
//
//   a  plain C++      b  C++ with fsdp::fully_shard
//   c  plain Python   d  Python with FSDP2's fully_shard
//
// The small transformer is bound by the host, the large one by the GPU (bf16 parameters,
// gradients reduced in fp32). Fake groups copy memory as real ones would, but wait for no peers.
// A time is measured over many steps between two synchronisations. A figure is the median of the
// rounds, with the quartiles; differences and ratios are taken within a round first. Before
// anything is timed, both sides are compared: parameters, groups, loss, gradients, collectives.
#include <fsdp/debug.h>
#include <fsdp/fsdp.h>
#include <fsdp/memory.h>
#include <fsdp/optim.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>

#include "bench_main.h"
#include "child.h"
#include "measure.h"
#include "transformer.h"

namespace {

using bench::Figure;
using nlohmann::json;

struct Case {
  const char* name = "";
  bench::TransformerOptions model;
  int64_t sequence = 0;
  int64_t batch = 1;
  bool bf16 = false; // parameters in bf16, gradients reduced in fp32
};

const std::array kCases{
    Case{
        .name = "host-bound",
        .model = {.dim = 256, .layers = 32, .heads = 4, .vocabulary = 256},
        .sequence = 64},
    Case{
        .name = "compute-bound",
        .model = {.dim = 2048, .layers = 16, .heads = 16, .vocabulary = 256},
        .sequence = 2048,
        .bf16 = true},
    Case{
        .name = "compute-bound, batch 4",
        .model = {.dim = 2048, .layers = 16, .heads = 16, .vocabulary = 256},
        .sequence = 2048,
        .batch = 4,
        .bf16 = true}};

constexpr int kWorldSize = 8;

// ------------------------------------------------------------ The C++ side, in a child

class ModelUnderTest {
 public:
  ModelUnderTest(const Case& which, bool sharded) : net_(which.model) {
    bench::fill_parameters(*net_);
    for (const auto& param : net_->parameters()) {
      numel_ += param.numel();
    }
    const auto bf16 = torch::kBFloat16;
    if (sharded) {
      fsdp::FullyShardOptions options{
          .mesh = fsdp::init_device_mesh(torch::kCUDA, {kWorldSize}),
          .reshard_after_forward = true};
      if (which.bf16) {
        options.mp_policy = {.param_dtype = bf16, .reduce_dtype = torch::kFloat};
      }
      for (auto& block : net_->blocks) {
        fsdp::fully_shard(block, options);
      }
      fsdp::fully_shard(net_, options);
    } else {
      net_->to(torch::kCUDA);
      if (which.bf16) {
        net_->to(bf16);
      }
    }
    params_ = net_->parameters();
    optimizer_ = std::make_unique<fsdp::optim::AdamW>(params_, 1e-5);
    const auto position = torch::arange(which.sequence, torch::kCUDA);
    tokens_ = (position * 7).remainder(which.model.vocabulary).repeat({which.batch, 1});
    targets_ = (position * 11).remainder(which.model.vocabulary).repeat({which.batch});
  }

  json hello() const {
    const auto modules = net_->modules();
    const auto groups = std::count_if(modules.begin(), modules.end(), [](const auto& module) {
      return fsdp::is_fsdp_module(*module);
    });
    return {{"torch", TORCH_VERSION}, {"numel", numel_}, {"groups", groups}};
  }

  json check() {
    fsdp::CommDebugMode comm;
    const auto loss = forward_backward().item<double>();
    double square = 0;
    for (const auto& param : params_) {
      square += param.grad().to(torch::kFloat).square().sum().item<double>();
    }
    optimizer_->zero_grad();
    return {
        {"loss", loss},
        {"grad_norm", std::sqrt(square)},
        {"all_gathers", comm.count("all_gather")},
        {"reduce_scatters", comm.count("reduce_scatter")}};
  }

  /// Seconds per step, without the optimizer and with it.
  std::array<double, 2> time(int steps) {
    std::array<double, 2> seconds{};
    for (const bool with_optimizer : {false, true}) {
      step(with_optimizer); // warms up
      torch::cuda::synchronize();
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < steps; ++i) {
        step(with_optimizer);
      }
      torch::cuda::synchronize();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      seconds[with_optimizer ? 1 : 0] = took.count() / steps;
    }
    return seconds;
  }

  int64_t memory() {
    step(true);
    fsdp::reset_peak_memory_stats(torch::kCUDA);
    step(true);
    step(true);
    torch::cuda::synchronize();
    return fsdp::memory_stats(torch::kCUDA).peak;
  }

 private:
  torch::Tensor forward_backward() {
    const auto logits = net_(tokens_);
    auto loss =
        torch::cross_entropy_loss(logits.view({-1, logits.size(-1)}).to(torch::kFloat), targets_);
    loss.backward();
    return loss;
  }

  void step(bool with_optimizer) {
    forward_backward();
    if (with_optimizer) {
      optimizer_->step();
    }
    optimizer_->zero_grad();
  }

  bench::Transformer net_;
  int64_t numel_ = 0;
  std::vector<torch::Tensor> params_;
  std::unique_ptr<fsdp::optim::AdamW> optimizer_;
  torch::Tensor tokens_;
  torch::Tensor targets_;
};

/// Understands the same commands as gpu.py, and answers in the same way.
int serve(const Case& which, bool sharded) {
  fsdp::init_process_group({.backend = "fake", .rank = 0, .world_size = kWorldSize});
  ModelUnderTest side(which, sharded);
  std::cout << side.hello() << std::endl;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string command;
    words >> command;
    if (command == "check") {
      std::cout << side.check() << std::endl;
    } else if (command == "memory") {
      std::cout << side.memory() << std::endl;
    } else {
      int steps = 1;
      words >> steps;
      const auto seconds = side.time(steps);
      std::cout << seconds[0] << " " << seconds[1] << std::endl;
    }
  }
  return 0;
}

// ------------------------------------------------------------ All four

struct Options {
  int rounds = 9;
  int steps = 10;
  std::string only;
  std::string python = FSDP_BENCH_PYTHON;
};

/// The four forms, by letter. `seconds` are per step, without and with the optimizer, by round.
struct FormResults {
  std::map<char, std::unique_ptr<bench::Child>> children;
  std::map<char, json> hello;
  std::map<char, std::array<std::vector<double>, 2>> seconds;
  std::map<char, double> memory;
};

FormResults start(const Case& which, const std::string& self, const Options& options) {
  FormResults forms;
  for (const char form : std::string("abcd")) {
    const bool sharded = form == 'b' || form == 'd';
    std::vector<std::string> words;
    if (form == 'a' || form == 'b') {
      words = {self, "--serve", which.name, "--sharded", sharded ? "1" : "0"};
    } else {
      words = {options.python, FSDP_BENCH_DIR "/gpu.py", "--sharded", sharded ? "1" : "0"};
      const auto add = [&](const char* name, int64_t value) {
        words.push_back(std::string("--") + name);
        words.push_back(std::to_string(value));
      };
      add("dim", which.model.dim);
      add("layers", which.model.layers);
      add("heads", which.model.heads);
      add("vocabulary", which.model.vocabulary);
      add("sequence", which.sequence);
      add("batch", which.batch);
      add("world-size", kWorldSize);
      add("bf16", which.bf16 ? 1 : 0);
    }
    forms.children[form] = std::make_unique<bench::Child>(words);
  }
  for (auto& [form, child] : forms.children) {
    const auto line = child->read_line();
    TORCH_CHECK(line, "form ", form, " did not start");
    forms.hello[form] = json::parse(*line);
  }
  return forms;
}

bool close_to(double x, double y, double tolerance) {
  return std::abs(x - y) <= tolerance * std::max(std::abs(x), std::abs(y));
}

/// Throws if C++ and Python differ in parameters, groups, loss, gradients or collectives.
void check(FormResults& forms, const Case& which) {
  std::map<char, json> found;
  for (auto& [form, child] : forms.children) {
    found[form] = json::parse(child->ask("check"));
  }
  const auto& groups = forms.hello['b']["groups"];
  TORCH_CHECK(
      forms.hello['a']["numel"] == forms.hello['c']["numel"] &&
          forms.hello['b']["numel"] == forms.hello['d']["numel"] &&
          groups == forms.hello['d']["groups"],
      "the sides have different models: ", json(forms.hello['b']).dump(), " and ",
      json(forms.hello['d']).dump());
  const double tolerance = which.bf16 ? 2e-2 : 1e-3;
  for (const auto& [ours, theirs] : {std::pair('a', 'c'), std::pair('b', 'd')}) {
    for (const char* what : {"loss", "grad_norm"}) {
      if (theirs == 'd' && what == std::string_view("grad_norm")) {
        continue; // the fake group of older torch versions does not write the reduced gradients
      }
      const auto x = found[ours][what].get<double>();
      const auto y = found[theirs][what].get<double>();
      TORCH_CHECK(
          close_to(x, y, tolerance), what, " of ", ours, " is ", x, ", of ", theirs, " ", y);
    }
  }
  for (const char form : {'b', 'd'}) {
    TORCH_CHECK(
        found[form]["all_gathers"].get<int64_t>() == 2 * groups.get<int64_t>() &&
            found[form]["reduce_scatters"] == groups,
        "form ", form, " ran ", found[form].dump(), " for ", groups.dump(), " groups");
  }
  printf(
      "%s: dim %ld, %ld layers, sequence %ld, batch %ld, %s; %.1f M parameters, %d groups, world "
      "size %d, torch %s\n",
      which.name, which.model.dim, which.model.layers, which.sequence, which.batch,
      which.bf16 ? "bf16 parameters reduced in fp32" : "fp32",
      1e-6 * forms.hello['a']["numel"].get<double>(), groups.get<int>(), kWorldSize,
      forms.hello['d']["torch"].get<std::string>().c_str());
  printf(
      "checked: same parameters and groups, two gathers and one reduction per group; loss and "
      "gradients agree: plain %.5f, sharded %.5f\n",
      found['a']["loss"].get<double>(), found['b']["loss"].get<double>());
}

void measure(FormResults& forms, const Options& options) {
  for (auto& [form, child] : forms.children) {
    forms.memory[form] = std::stod(child->ask("memory"));
  }
  for (int round = 0; round < options.rounds; ++round) {
    std::string order = "abcd";
    if (round % 2 == 1) {
      std::reverse(order.begin(), order.end());
    }
    for (const char form : order) {
      std::istringstream answer(forms.children[form]->ask("time " + std::to_string(options.steps)));
      for (auto& times : forms.seconds[form]) {
        double seconds = 0;
        answer >> seconds;
        TORCH_CHECK(answer, "form ", form, " answered '", answer.str(), "'");
        times.push_back(seconds);
      }
    }
  }
}

class Report {
 public:
  Report(const FormResults& forms, size_t rounds) : forms_(forms), rounds_(rounds) {}

  void print_times() const {
    printf(
        "%-22s %9s %19s %20s %12s\n", "ms per step", "median", "[quartiles]", "without optimizer",
        "peak MiB");
    for (const auto& [form, name] :
         {std::pair('a', "a  C++"), std::pair('b', "b  C++ fully_shard"),
          std::pair('c', "c  Python"), std::pair('d', "d  Python FSDP2")}) {
      const Figure step(forms_.seconds.at(form)[1]);
      printf(
          "%-22s %9.3f   [%7.3f, %7.3f] %20.3f %12.1f\n", name, 1e3 * step.median, 1e3 * step.low,
          1e3 * step.high, 1e3 * Figure(forms_.seconds.at(form)[0]).median,
          forms_.memory.at(form) / (1 << 20));
    }
  }

  /// Prints a ratio. Returns false if it is above `most`.
  bool ratio(const char* name, const std::vector<double>& rounds, std::optional<double> most) {
    const Figure figure(rounds);
    const bool kept = !most || figure.median <= *most;
    printf("%-44s %8.3f   [%7.3f, %7.3f]", name, figure.median, figure.low, figure.high);
    if (most) {
      printf("   at most %.3f: %s", *most, kept ? "kept" : "MISSED");
    }
    printf("\n");
    return kept;
  }
  std::vector<double> over(char x, char y, int part = 1) const {
    return bench::by_round(rounds_, [&](size_t i) {
      return forms_.seconds.at(x)[part][i] / forms_.seconds.at(y)[part][i];
    });
  }
  std::vector<double> added_over_added(int part) const {
    const auto at = [&](char form, size_t i) { return forms_.seconds.at(form)[part][i]; };
    return bench::by_round(
        rounds_, [&](size_t i) { return (at('b', i) - at('a', i)) / (at('d', i) - at('c', i)); });
  }
  std::vector<double> memory() const {
    return {forms_.memory.at('b') / forms_.memory.at('d')};
  }

 private:
  const FormResults& forms_;
  const size_t rounds_;
};

bool run_case(const Case& which, const std::string& self, const Options& options) {
  auto forms = start(which, self, options);
  check(forms, which);
  measure(forms, options);
  Report report(forms, options.rounds);
  report.print_times();
  bool kept = true;
  if (which.bf16) {
    kept &= report.ratio("b / a, sharded over plain, C++", report.over('b', 'a'), 1.06);
    report.ratio("  without the optimizer", report.over('b', 'a', 0), {});
    report.ratio("d / c, sharded over plain, Python", report.over('d', 'c'), {});
    report.ratio("  without the optimizer", report.over('d', 'c', 0), {});
  } else {
    kept &= report.ratio("b / d, step over Python's", report.over('b', 'd'), 1.0 / 3);
    kept &= report.ratio("(b - a) / (d - c), added over Python's", report.added_over_added(1), 0.1);
    report.ratio("  without the optimizer", report.added_over_added(0), {});
  }
  kept &= report.ratio("peak memory of b over that of d", report.memory(), 1);
  printf("\n");
  fflush(stdout);
  return kept;
}

int run(int argc, char** argv) {
  CLI::App app("Sharded training on a GPU: ours and Python FSDP2's, in one run.");
  Options options;
  std::string served;
  bool sharded = false;
  app.add_option("--rounds", options.rounds, "Rounds, of which the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--steps", options.steps, "Steps of each form in a round")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--only", options.only, "host-bound, compute-bound or \"compute-bound, batch 4\"");
  app.add_option("--python", options.python, "An interpreter with torch")->capture_default_str();
  app.add_option("--serve", served)->group("");
  app.add_option("--sharded", sharded)->group("");
  CLI11_PARSE(app, argc, argv);
  if (!torch::cuda::is_available()) {
    fprintf(stderr, "gpu: there is no GPU here\n");
    return 1;
  }
  bool kept = true;
  for (const auto& which : kCases) {
    if (served == which.name) {
      return serve(which, sharded);
    }
    if (served.empty() && (options.only.empty() || options.only == which.name)) {
      kept &= run_case(which, "/proc/self/exe", options);
    }
  }
  return kept ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
  return bench::bench_main("gpu", run, argc, argv);
}
