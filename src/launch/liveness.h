#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "launch/socket.h"

namespace fsdp::detail {

/// Tells which peers are gone. Every rank keeps a listening socket and never reads
/// from it. The kernel accepts connections for a live process, however busy the
/// process is. When the process dies, the kernel closes its connections and refuses
/// new ones. A rank that does not answer at the start, when all ranks are alive, is
/// behind a firewall or has another address. Such a rank is never called gone.
class Liveness {
 public:
  /// Opens this rank's socket on `address`.
  explicit Liveness(const std::string& address);

  /// "address port" of this rank's socket, for `set_peers` of the peers.
  std::string endpoint() const;

  /// `endpoints[r]` belongs to rank r. Must be called once, before `is_gone` and
  /// `gone`, while all ranks are alive.
  void set_peers(const std::vector<std::string>& endpoints);

  /// Returns true if the rank no longer answers. Cheap to call often, because the
  /// connection to the rank is kept.
  bool is_gone(int rank);
  std::vector<int> gone();

 private:
  void close_accepted() const;

  const std::string address_;
  const Listener listener_;
  std::vector<Endpoint> peers_; // by rank
  std::vector<bool> answered_;  // by rank: whether it answered in set_peers
  std::mutex mutex_;
  std::vector<Fd> connections_; // by rank; -1: none
};

} // namespace fsdp::detail
