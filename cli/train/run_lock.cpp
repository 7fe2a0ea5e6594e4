#include "cli/train/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <iostream>
#include <string>

#include "cli/check.h"
#include "cli/files.h"

namespace fsdp::cli {

namespace {

/// "process 4711 on host alpha, since 2026-11-16 19:43:46"
std::string describe_this_process() {
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  char since[32] = {};
  const auto now = std::time(nullptr);
  tm local{};
  std::strftime(since, sizeof(since), "%Y-%m-%d %H:%M:%S", localtime_r(&now, &local));
  return c10::str("process ", getpid(), " on host ", host, ", since ", since);
}

[[noreturn]] void throw_held(
    const std::filesystem::path& folder, const std::filesystem::path& lock) {
  const auto holder = read_file(lock).value_or("");
  throw_checkpoint_error(
      "another run writes to ", folder.string(), ": ",
      holder.empty() ? "one that has just begun" : holder,
      "; wait for its end, end it, or use another --run. If its machine is gone for good, remove ",
      lock.string());
}

} // namespace

void RunLock::check_free(const std::filesystem::path& folder) {
  const auto path = folder / "lock";
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  // Several ranks may look at the same time, so the lock is shared.
  const bool is_held = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  if (fd >= 0) {
    close(fd);
  }
  if (is_held) {
    throw_held(folder, path);
  }
}

RunLock::RunLock(const std::filesystem::path& folder) : path_(folder / "lock") {
  do { // once more if the holder's end removed the file in between
    if (fd_ >= 0) {
      close(fd_);
    }
    fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd_ < 0) {
      throw_cannot_write(path_);
    }
    if (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      if (error != EWOULDBLOCK) {
        std::cerr << "fsdp: warning: " << path_.string() << " cannot be locked ("
                  << std::strerror(error) << "); make sure that no other run writes to this folder"
                  << std::endl;
        return;
      }
      close(fd_);
      throw_held(folder, path_);
    }
  } while (!is_in_place());
  const auto holder = describe_this_process();
  if (ftruncate(fd_, 0) != 0 || write(fd_, holder.data(), holder.size()) < 0) {
    close(fd_);
    throw_cannot_write(path_);
  }
}

RunLock::~RunLock() {
  if (is_in_place()) {
    unlink(path_.c_str()); // before the lock is free: it is this run's file
  }
  close(fd_);
}

bool RunLock::is_in_place() const {
  struct stat opened{};
  struct stat there{};
  return fstat(fd_, &opened) == 0 && stat(path_.c_str(), &there) == 0 &&
         opened.st_ino == there.st_ino && opened.st_dev == there.st_dev;
}

} // namespace fsdp::cli
