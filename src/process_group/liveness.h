#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "process_group/socket.h"

namespace fsdp::detail {

/// Tells which peers are gone. Every rank keeps a listening socket that nobody
/// reads: the kernel accepts connections for a live process, however busy, and
/// ends and refuses them once it is dead. Who does not answer at the start, when all
/// are there, is behind a firewall or has another address: never called gone.
class Liveness {
 public:
  /// Opens this rank's socket on `address`.
  explicit Liveness(const std::string& address);

  /// "address port": what the peers need to know.
  std::string endpoint() const;

  /// `endpoints[r]` is rank r's, which is there; called once, before the following.
  void set_peers(std::vector<std::string> endpoints);

  /// Whether the rank no longer answers. May be asked often: a connection is kept.
  bool is_gone(int rank);
  std::vector<int> gone();

 private:
  void drop_callers() const;

  const std::string address_;
  const Listener listener_;
  std::vector<std::string> endpoints_;
  std::vector<bool> answered_; // by rank; at the start
  std::mutex mutex_;
  std::vector<Fd> connections_; // by rank; -1: none
};

} // namespace fsdp::detail
