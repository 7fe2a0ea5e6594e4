#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <fsdp/export.h>

namespace fsdp {

/// Returns true if a launcher (torchrun, `fsdp run`, Slurm, Open MPI, PMI) started this process,
/// so that init_process_group() would join its world.
FSDP_API bool is_launched();

/// How often the launcher has started this job again after a failure: `fsdp run --restarts`,
/// torchrun --max-restarts, or a job that Slurm has requeued. 0 if it never has.
FSDP_API int num_restarts();

/// This process among the ranks that its launcher started on this machine.
struct LocalRank {
  int rank = 0;
  int num_ranks = 1; // 1 if the launcher does not say
};
/// Throws ConfigError if the launcher's variables are not valid.
FSDP_API LocalRank local_rank();

struct LaunchOptions {
  /// Number of ranks on this node. It must be the same on every node. After a failure the job may
  /// go on with fewer.
  int num_ranks = 1;
  int num_nodes = 1;
  int node_rank = 0;
  /// "host:port" of node 0. May be empty if there is a single node, which then listens on a free
  /// port of the loopback address.
  std::string master = {};
  /// Called a few times a second while this node waits for others. If it returns true, the launch
  /// is given up with CommError.
  std::function<bool()> stop = {};
  /// How often the job may start again after a failure.
  int max_restarts = 0;
  /// A job that starts again needs this many ranks, of all nodes together. 0: as many as before.
  int min_ranks = 0;
};

/// Connects the launchers of one job, of which each machine runs one. They share the store through
/// which the ranks meet, which outlives every rank, and report failures to each other. `fsdp run`
/// is such a launcher; you can write your own, for example for a scheduler.
class FSDP_API LaunchJob {
 public:
  /// Node 0 serves the store, and the other nodes connect to it. Throws ConfigError if the
  /// options are not valid or another node has other numbers of nodes or ranks. Throws CommError
  /// if the nodes do not connect.
  explicit LaunchJob(const LaunchOptions& options);
  ~LaunchJob();
  LaunchJob(const LaunchJob&) = delete;
  LaunchJob& operator=(const LaunchJob&) = delete;

  /// The environment variables for rank `local_rank` of this node, as torchrun sets them.
  std::map<std::string, std::string> environment(int local_rank) const;
  /// Number of ranks on this node, of all nodes, and before those of this node.
  int num_ranks() const;
  int world_size() const;
  int first_rank() const;
  /// How often the job has started again.
  int attempt() const;

  struct Failure {
    std::string what;
    int exit_code = 1;
  };
  /// Tells the other nodes that a rank failed on this one.
  void report(const Failure& failure);
  /// Returns the failure that a node reported, or a failure if node 0 is gone. Call it repeatedly
  /// while the ranks run: it also tells node 0 that this node is alive.
  std::optional<Failure> failure_elsewhere();

  /// Agrees with the other nodes to start the job again. Call it on every node after a failure,
  /// when the ranks of this node have ended. `ranks_left` is the number of those that did not fail
  /// themselves. The job goes on with what is left, or with LaunchOptions::min_ranks if that is
  /// more. A node that does not call this within a few seconds is left out; if it comes back with a
  /// new LaunchJob, the job starts again with it. Returns "" and sets the numbers above, which may
  /// be 0 for this node, or returns why the job cannot go on. Throws CommError if node 0 is silent.
  std::string restart(int ranks_left);

  /// Call it when the ranks of this node have ended. On node 0 it returns when all other nodes
  /// have called it, too, because their ranks use node 0's store. After a failure it waits a few
  /// seconds at most. It ends early if `stop` returns true. Throws CommError if the other nodes
  /// give no sign of life.
  void leave(bool failed, const std::function<bool()>& stop);

 private:
  void rejoin();

  struct State;
  std::unique_ptr<State> state_;
};

} // namespace fsdp
