#pragma once

#include <filesystem>

namespace fsdp::cli {

/// Keeps other runs out of a run's folder while it exists: it holds the file `lock` in that folder.
/// The system frees the lock when this process ends, however it ends.
class RunLock {
 public:
  /// Throws CheckpointError if another run has the folder. The message says who that is.
  explicit RunLock(const std::filesystem::path& folder);
  /// Throws the same error, and locks nothing.
  static void check_free(const std::filesystem::path& folder);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  bool is_in_place() const;

  std::filesystem::path path_;
  int fd_ = -1;
};

} // namespace fsdp::cli
