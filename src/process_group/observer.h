#pragma once

#include <cstdint>
#include <string>

#include "process_group/collective_call.h"

namespace fsdp::detail {

/// A collective that starts.
struct ObservedCollective {
  uint64_t id = 0; // unique in this process; the first one is 1
  const CollectiveCall& call;
  const std::string& group;
  const std::string& module;
};

/// Is told of the collectives that one thread starts and of the thread's waits for
/// them. It observes the thread that constructs it.
class CollectiveObserver {
 public:
  CollectiveObserver();
  virtual ~CollectiveObserver();
  CollectiveObserver(const CollectiveObserver&) = delete;
  CollectiveObserver& operator=(const CollectiveObserver&) = delete;

  virtual void on_collective(const ObservedCollective& started) = 0;
  /// Called around every wait. `id` is 0 if no observer saw the collective start.
  virtual void on_wait_begin(uint64_t /*id*/) {}
  virtual void on_wait_end(uint64_t /*id*/) {}

  /// Tells all observers of the calling thread. Returns the collective's id, or 0 if
  /// there are no observers.
  static uint64_t notify(const CollectiveCall& call, const std::string& group);

 private:
  friend class CollectiveWait;

  CollectiveObserver* outer_;
};

/// Tells the calling thread's observers that the thread waits for a collective, from
/// the construction of this object to its destruction.
class CollectiveWait {
 public:
  explicit CollectiveWait(uint64_t id);
  ~CollectiveWait();
  CollectiveWait(const CollectiveWait&) = delete;
  CollectiveWait& operator=(const CollectiveWait&) = delete;

 private:
  const uint64_t id_;
};

/// Names the module that this thread's collectives belong to, while this object
/// lives, and their purpose, on which the ranks must agree. Errors and observers
/// show the name. The arguments must outlive this object.
class CollectiveLabel {
 public:
  using Purpose = std::shared_ptr<const CollectivePurpose>;

  explicit CollectiveLabel(const std::string& module, const Purpose* purpose = nullptr);
  ~CollectiveLabel();
  CollectiveLabel(const CollectiveLabel&) = delete;
  CollectiveLabel& operator=(const CollectiveLabel&) = delete;

  static const std::string& current();
  static Purpose current_purpose();

 private:
  const std::string* outer_;
  const Purpose* outer_purpose_;
};

} // namespace fsdp::detail
