// `fsdp run`: starts a program once per rank and watches over the ranks.
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fsdp/error.h>
#include <fsdp/launch.h>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/run/child.h"

namespace fsdp::cli {

namespace {

using Clock = std::chrono::steady_clock;

// From SIGTERM to SIGKILL.
constexpr auto kGrace = std::chrono::seconds(3);
constexpr auto kPoll = std::chrono::milliseconds(100);

struct RunOptions {
  int num_ranks = 1;
  int num_nodes = 1;
  int node_rank = 0;
  std::string master;
  bool bare = false;
  int restarts = 0;
  int min_ranks = 0;
  std::vector<std::string> program;
};

/// Blocks the signals that end `fsdp run`, and SIGCHLD, and offers a file descriptor to poll.
class Signals {
 public:
  Signals() {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) {
      sigaddset(&set, signal);
    }
    sigprocmask(SIG_BLOCK, &set, nullptr);
    fd_ = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    watcher_ = std::thread([this] { watch(); });
  }
  ~Signals() {
    ends_ = true;
    watcher_.join();
    close(fd_);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int fd() const {
    return fd_;
  }
  /// The signal that asks `fsdp run` to end, if one came.
  std::optional<int> take() const {
    std::optional<int> asked;
    signalfd_siginfo info{};
    while (read(fd_, &info, sizeof(info)) == sizeof(info)) {
      if (info.ssi_signo != SIGCHLD) {
        asked = static_cast<int>(info.ssi_signo);
      }
    }
    return asked;
  }

 private:
  /// Ends the process if nobody takes a signal: then the launcher hangs in a call of a store that
  /// does not answer, which nothing can interrupt. Its ranks die with it.
  void watch() const {
    auto taken = Clock::now(); // when no signal was waiting
    for (; !ends_; std::this_thread::sleep_for(kPoll)) {
      const int signal = waiting();
      if (signal == 0) {
        taken = Clock::now();
      } else if (Clock::now() - taken > kGrace) {
        std::cerr << "fsdp run: ended by " << strsignal(signal)
                  << ", while a store did not answer; the ranks here were killed." << std::endl;
        _exit(128 + signal);
      }
    }
  }
  static int waiting() {
    sigset_t set;
    sigpending(&set);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
      if (sigismember(&set, signal) == 1) {
        return signal;
      }
    }
    return 0;
  }

  int fd_ = -1;
  std::atomic<bool> ends_ = false;
  std::thread watcher_; // last, because it uses the others
};

class Launcher {
 public:
  Launcher(const RunOptions& options, const Signals& signals, LaunchJob& job)
      : options_(options), signals_(signals), job_(job) {}

  int run() {
    do {
      run_ranks();
    } while (starts_again());
    job_.leave(ending_, [this, failed = ending_] {
      next_round();
      watch_other_nodes();
      return second_signal_ || ending_ != failed;
    });
    output_.add(1, closing_words_);
    output_.flush();
    while (output_.waiting() && !second_signal_) {
      next_round(); // the other nodes may be gone by now
    }
    return exit_code_;
  }

 private:
  /// Starts the ranks of this node and waits until all have ended.
  void run_ranks() {
    for (int local = 0; local < job_.num_ranks(); ++local) {
      const int rank = job_.first_rank() + local;
      children_.push_back(std::make_unique<Child>(
          rank, output_, options_.program, job_.environment(local), options_.bare && rank == 0));
    }
    while (any_running()) {
      next_round();
      watch_other_nodes();
      enforce_grace();
    }
    // Kills processes that the ranks left running, and passes on the rest of the output.
    children_.clear();
    while (output_.waiting() && !second_signal_) {
      next_round();
      watch_other_nodes();
    }
  }

  /// After a failure: agrees with the other nodes to start again, if the job may.
  bool starts_again() {
    if (!may_restart_ || options_.restarts == 0) {
      return false;
    }
    const auto why_not = job_.restart(job_.num_ranks() - ranks_lost_);
    if (!why_not.empty()) {
      closing_words_ += "fsdp run: not started again: " + why_not + ".\n";
      return false;
    }
    output_.add(
        1, closing_words_ + "fsdp run: restart " + std::to_string(job_.attempt()) + " of " +
               std::to_string(options_.restarts) + ", on " + std::to_string(job_.world_size()) +
               " ranks.\n");
    closing_words_.clear();
    ending_ = may_restart_ = false;
    ranks_lost_ = exit_code_ = 0;
    return true;
  }

  bool any_running() const {
    return std::ranges::any_of(children_, [](const auto& child) { return child->running(); });
  }

  /// Waits a moment for output, ended ranks and signals, and handles them.
  void next_round() {
    pass_output_on();
    for (const auto& child : children_) {
      if (child->reap() && child->exit_code() != 0 && !ending_) {
        ended(*child);
      }
    }
    if (const auto signal = signals_.take()) {
      interrupted(*signal);
    }
    if (output_.error() != 0 && !ending_) {
      output_failed(output_.error());
    }
  }

  void pass_output_on() {
    std::vector<pollfd> fds{
        {.fd = signals_.fd(), .events = POLLIN, .revents = 0},
        {.fd = output_.fd(0), .events = POLLOUT, .revents = 0},
        {.fd = output_.fd(1), .events = POLLOUT, .revents = 0}};
    const auto first = fds.size();
    for (const auto& child : children_) {
      for (int stream = 0; stream < 2; ++stream) {
        const int fd = output_.full(stream) ? -1 : child->fd(stream);
        fds.push_back({.fd = fd, .events = POLLIN, .revents = 0});
      }
    }
    poll(fds.data(), fds.size(), static_cast<int>(kPoll.count()));
    for (size_t i = first; i < fds.size(); ++i) {
      if (fds[i].revents != 0) {
        children_[(i - first) / 2]->forward(static_cast<int>((i - first) % 2));
      }
    }
    output_.flush();
  }

  /// A rank that was asked to end and did so, as `fsdp train` does, has told the other ranks: they
  /// end by themselves. A rank that a signal has killed could not tell them, and has failed.
  void ended(Child& child) {
    if (child.signal() != 0 || !was_asked(child.exit_code())) {
      failed(child);
    } else if (exit_code_ == 0) {
      exit_code_ = child.exit_code();
    }
  }

  void failed(Child& child) {
    child.forward_rest(1);
    const int code = child.exit_code();
    std::string how = "exit code " + std::to_string(code);
    if (const int signal = child.signal()) {
      how = "signal " + std::to_string(signal) + " (" + strsignal(signal) + ")";
    }
    const auto what = "rank " + std::to_string(child.rank()) + " failed first, with " + how;
    closing_words_ = "fsdp run: " + what + "; the other ranks were ended.\n";
    if (!child.last_errors().empty()) {
      closing_words_ += "fsdp run: its last lines on stderr:\n";
      for (const auto& line : child.last_errors()) {
        closing_words_ += "  " + line + "\n";
      }
    }
    job_.report({what, code});
    may_restart_ = may_help(code);
    ranks_lost_ = 1;
    end_all(code, SIGTERM, /*patiently=*/false);
  }

  void interrupted(int signal) {
    if (Clock::now() < same_signal_until_) {
      return;
    }
    same_signal_until_ = Clock::now() + kSameSignal;
    if (ending_ && !may_restart_) { // the second signal: end at once
      kill_at_ = Clock::now();
      second_signal_ = true;
      return;
    }
    const bool failed = ending_; // then the ranks are being ended already
    may_restart_ = false;
    closing_words_ = std::string("fsdp run: ended by ") + strsignal(signal) + ".\n";
    job_.report({std::string("fsdp run was ended by ") + strsignal(signal), 128 + signal});
    end_all(128 + signal, signal, /*patiently=*/!failed);
  }

  /// Ends the ranks because their output cannot be written.
  void output_failed(int error) {
    const auto what = std::string("the output cannot be written: ") + std::strerror(error);
    closing_words_ = "fsdp run: " + what + "; the ranks were ended.\n";
    const int code = error == EPIPE ? 128 + SIGPIPE : 1; // as in a shell
    job_.report({what, code});
    end_all(code, SIGTERM, /*patiently=*/false);
  }

  void watch_other_nodes() {
    if (ending_) {
      return;
    }
    if (const auto failure = job_.failure_elsewhere()) {
      closing_words_ =
          "fsdp run: on another node: " + failure->what + "; the ranks here were ended.\n";
      const bool asked = was_asked(failure->exit_code);
      may_restart_ = !asked && may_help(failure->exit_code);
      end_all(failure->exit_code, asked ? failure->exit_code - 128 : SIGTERM, asked);
    }
  }

  /// Returns false for the exit code of a program that was started wrongly: to start it again does
  /// not help.
  static bool may_help(int exit_code) {
    return exit_code != kBadConfig;
  }

  /// Returns true for the exit code of a process that ended normally after SIGINT or SIGTERM.
  static bool was_asked(int exit_code) {
    return exit_code == 128 + SIGINT || exit_code == 128 + SIGTERM;
  }

  /// Sends a signal to all ranks. If a user asked for the end, this waits `patiently`, because
  /// ranks may have much to save, until a second signal comes. Otherwise ranks are killed after
  /// kGrace.
  void end_all(int exit_code, int signal, bool patiently) {
    ending_ = true;
    exit_code_ = exit_code;
    kill_at_ = patiently ? Clock::time_point::max() : Clock::now() + kGrace;
    for (const auto& child : children_) {
      child->signal_group(signal);
      child->signal_group(SIGCONT); // a rank that was stopped must obey, too
    }
  }

  void enforce_grace() {
    if (ending_ && Clock::now() >= kill_at_) {
      for (const auto& child : children_) {
        child->signal_group(SIGKILL);
      }
    }
  }

  const RunOptions& options_;
  const Signals& signals_;
  LaunchJob& job_;
  Output output_;
  std::vector<std::unique_ptr<Child>> children_;
  bool ending_ = false;
  bool may_restart_ = false;   // a rank or a node has failed; nobody asked for the end
  int ranks_lost_ = 0;         // how many ranks of this node have failed by themselves
  bool second_signal_ = false; // a second signal came: wait for nothing
  Clock::time_point same_signal_until_;
  int exit_code_ = 0;
  Clock::time_point kill_at_;
  std::string closing_words_;
};

/// Throws ConfigError if this process may not open enough files for its ranks. Otherwise the
/// store fails with an unclear message, or tries again for ever.
void check_open_files(int num_ranks) {
  const auto needed = 32 + 6 * static_cast<rlim_t>(num_ranks); // pipes, sockets, the store's own
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  check_config(
      limit.rlim_cur >= needed, num_ranks, num_ranks == 1 ? " rank needs " : " ranks need ", needed,
      " open files, and ", limit.rlim_cur, " are allowed; raise the limit (ulimit -n ", needed,
      "), or start fewer ranks");
}

int launch(const RunOptions& options) {
  check_open_files(options.num_ranks);
  const Signals signals; // first, so that the store's threads block these signals, too
  std::optional<int> asked;
  try {
    LaunchJob job(
        {.num_ranks = options.num_ranks,
         .num_nodes = options.num_nodes,
         .node_rank = options.node_rank,
         .master = options.master,
         .stop = [&] { return (asked = signals.take()).has_value(); },
         .max_restarts = options.restarts,
         .min_ranks = options.min_ranks});
    return Launcher(options, signals, job).run();
  } catch (const CommError&) {
    if (!asked) {
      throw;
    }
    std::cerr << "fsdp run: ended by " << strsignal(*asked) << ", while waiting for other nodes.\n";
    return 128 + *asked;
  }
}

} // namespace

void add_run(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("run", "Start a program once per rank, as processes");
  auto options = std::make_shared<RunOptions>();
  command->add_option("-n,--ranks", options->num_ranks, "Number of ranks on this machine")
      ->check(CLI::Range(1, 1 << 20))
      ->required();
  command->add_option("--nnodes", options->num_nodes, "Number of machines; start fsdp run on each")
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--node-rank", options->node_rank, "Number of this machine, from 0")
      ->check(CLI::NonNegativeNumber);
  command->add_option(
      "--master", options->master, "HOST:PORT on machine 0 that all machines can reach");
  command->add_flag(
      "--bare", options->bare, "Put no \"[rank 0]\" before the lines of rank 0's output");
  command
      ->add_option(
          "--restarts", options->restarts,
          "How many times to start the job again when a rank or a machine is lost")
      ->check(CLI::Range(0, 1 << 20));
  command
      ->add_option(
          "--min-ranks", options->min_ranks,
          "Start again without the lost ranks, if at least this many are left [on all again]")
      ->check(CLI::Range(1, 1 << 20));
  // No extra arguments: CLI11 would read "[1,2]" as two values. `main` adds the words.
  command->add_option("program", options->program, "Program and its arguments, after --")
      ->required()
      ->allow_extra_args(false);
  command->footer("Example: fsdp run -n 4 -- ./my_program --its --options");
  command->callback([options, &action] { action = [options] { return launch(*options); }; });
}

} // namespace fsdp::cli
