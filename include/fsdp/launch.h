#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <fsdp/export.h>

namespace fsdp {

/// Whether a launcher (torchrun, `fsdp run`, Slurm, Open MPI, PMI) started this
/// process, so that init_process_group() would join its world.
FSDP_API bool is_launched();

struct LaunchOptions {
  /// Ranks on this node; the same on every node.
  int num_ranks = 1;
  int num_nodes = 1;
  int node_rank = 0;
  /// "host:port" on node 0. May be empty on a single node, which then listens
  /// on a free port of the loopback address.
  std::string master = {};
  /// Asked a few times a second while node 0 does not answer; true gives up.
  std::function<bool()> stop = {};
};

/// What launchers of one job share, one launcher per machine: the store where
/// the ranks meet, which outlives any rank, and the news of failures. `fsdp
/// run` is one; a scheduler's own may use it too.
class FSDP_API LaunchJob {
 public:
  /// Node 0 serves the store; the others connect to it. Throws CommError, or
  /// ConfigError, also when another node has other numbers of nodes or ranks.
  explicit LaunchJob(const LaunchOptions& options);
  ~LaunchJob();
  LaunchJob(const LaunchJob&) = delete;
  LaunchJob& operator=(const LaunchJob&) = delete;

  /// Variables for rank `local_rank` of this node, as torchrun sets them.
  std::map<std::string, std::string> environment(int local_rank) const;

  struct Failure {
    std::string what;
    int exit_code = 1;
  };
  /// Tells the other nodes that a rank failed here.
  void report(const Failure& failure);
  /// What another node reported, or that node 0 is gone.
  std::optional<Failure> failure_elsewhere();

  /// To be called when the ranks here have ended. Node 0 returns when the
  /// others have called it too, since their ranks use its store: after a
  /// failure that takes a few seconds at most. Ends early when `stop` says so,
  /// and throws CommError when none of the others gives a sign of life.
  void leave(bool failed, const std::function<bool()>& stop);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace fsdp
