#pragma once

#include <chrono>
#include <map>
#include <string>

namespace fsdp {

/// The options of init_process_group: how a process joins the world.
struct InitOptions {
  /// "gloo", "nccl", "threads" (ranks are threads of one process) or "fake" (nothing is sent; for
  /// measurements). If empty, nccl if the library was built with it and a GPU is present, else
  /// gloo.
  std::string backend = {};
  /// How the ranks find each other. "env://": by the environment variables of torchrun, `fsdp
  /// run`, Slurm, Open MPI or another PMI launcher; without a launcher the world has one rank.
  /// "tcp://host:port": rank 0 listens there. "file:///path": a new file that every rank can see.
  std::string init_method = "env://";
  /// If negative, taken from the environment; with "threads", rank 0 of 1.
  int rank = -1;
  int world_size = -1;
  /// How long a rank waits for the others, in init_process_group and in every collective.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// Names and values that must be the same on every rank, for example the options of a program.
  /// If they differ, every rank throws ConfigError with the names, the values and the ranks. They
  /// are compared when the ranks meet through a store: with "gloo" and "nccl".
  std::map<std::string, std::string> same = {};
};

} // namespace fsdp
