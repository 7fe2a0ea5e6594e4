#pragma once

#include <cstdint>
#include <string>

#include "process_group/collective_call.h"

namespace fsdp::detail {

/// A collective as it starts.
struct ObservedCollective {
  uint64_t id = 0; // of this process, from 1
  const CollectiveCall& call;
  const std::string& group;
  const std::string& module;
};

/// Sees the collectives that one thread starts, and its waiting for them.
class CollectiveObserver {
 public:
  CollectiveObserver();
  virtual ~CollectiveObserver();
  CollectiveObserver(const CollectiveObserver&) = delete;
  CollectiveObserver& operator=(const CollectiveObserver&) = delete;

  virtual void on_collective(const ObservedCollective& started) = 0;
  /// Around every wait, for those that nobody saw start too (0).
  virtual void on_wait_begin(uint64_t /*id*/) {}
  virtual void on_wait_end(uint64_t /*id*/) {}

  /// Tells all those of the calling thread. Returns the collective's id, 0 where
  /// there are none.
  static uint64_t notify(const CollectiveCall& call, const std::string& group);

 private:
  friend class CollectiveWait;

  CollectiveObserver* outer_;
};

/// While it lives, the calling thread waits for a collective.
class CollectiveWait {
 public:
  explicit CollectiveWait(uint64_t id);
  ~CollectiveWait();
  CollectiveWait(const CollectiveWait&) = delete;
  CollectiveWait& operator=(const CollectiveWait&) = delete;

 private:
  const uint64_t id_;
};

/// The module that collectives are for while this lives: for errors and
/// observers. `module` must outlive it.
class CollectiveLabel {
 public:
  explicit CollectiveLabel(const std::string& module);
  ~CollectiveLabel();
  CollectiveLabel(const CollectiveLabel&) = delete;
  CollectiveLabel& operator=(const CollectiveLabel&) = delete;

  static const std::string& current();

 private:
  const std::string* outer_;
};

} // namespace fsdp::detail
