#pragma once

#include <string>

#include "process_group/collective_call.h"

namespace fsdp::detail {

/// Sees the collectives that one thread starts.
class CollectiveObserver {
 public:
  CollectiveObserver();
  virtual ~CollectiveObserver();
  CollectiveObserver(const CollectiveObserver&) = delete;
  CollectiveObserver& operator=(const CollectiveObserver&) = delete;

  virtual void on_collective(
      const CollectiveCall& call, const std::string& group, const std::string& module) = 0;

  /// Tells all those of the calling thread.
  static void notify(const CollectiveCall& call, const std::string& group);

 private:
  CollectiveObserver* outer_;
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
