#pragma once

#include <string>
#include <vector>

#include "process_group/socket.h"

namespace fsdp::detail {

/// Tells, after a failure, which peers are gone. Every rank keeps a listening
/// socket that nobody reads: the kernel accepts connections for a live
/// process, however busy, and refuses them once it is dead. It costs nothing
/// while all is well.
class Liveness {
 public:
  /// Opens this rank's socket on `address`.
  explicit Liveness(const std::string& address);

  /// "address port": what the peers need to know.
  std::string endpoint() const;

  /// `endpoints[r]` is rank r's; called once, before `gone`.
  void set_peers(std::vector<std::string> endpoints);

  /// The ranks that no longer answer.
  std::vector<int> gone() const;

 private:
  const std::string address_;
  const Listener listener_;
  std::vector<std::string> endpoints_;
};

} // namespace fsdp::detail
