#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/fd.h"

namespace fsdp::detail {

// Files and folders by system calls. If a call fails, throws a CheckpointError that names the
// file. The functions of std::filesystem are not used: some torch builds export copies of them
// that crash, and std::filesystem cannot sync.

using Path = std::filesystem::path;

/// An open file.
class File {
 public:
  /// Opens a regular file for reading. Throws for anything else, and does not block on a pipe.
  static File open(const Path& path);
  /// Opens a file for writing and keeps its contents. Makes the file if it does not exist.
  static File create(const Path& path);

  const Path& path() const {
    return path_;
  }
  int64_t size() const;
  /// Changes if somebody writes to the file, or puts another file in its place.
  using Version = std::array<int64_t, 5>;
  Version version() const;
  /// Reads exactly `size` bytes. Throws CheckpointError if the file ends before.
  void read(int64_t offset, void* data, int64_t size) const;
  void write(int64_t offset, const void* data, int64_t size) const;
  void resize(int64_t size) const;
  void sync() const;
  /// Tells the system that it may begin to write these bytes to the disk, so that `sync` takes less
  /// time.
  void begin_sync(int64_t offset, int64_t size) const;
  /// Sets whether writes bypass the page cache. Such writes must be of whole, aligned pages.
  /// Returns false if the file system does not support them.
  bool set_direct(bool direct) const;
  /// Locks the file until it is closed. Returns false and sets errno if it cannot: to EWOULDBLOCK
  /// if somebody else holds the lock.
  bool try_lock() const;

 private:
  File(Path path, Fd fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  Path path_;
  Fd fd_;
};

/// Writes a file from its first byte to its last.
class FileWriter {
 public:
  /// `direct`: bypass the page cache if possible. This takes a fraction of the processor's time,
  /// but the next reader of the file has to wait for the disk.
  FileWriter(const Path& path, bool direct);

  void append(const void* data, int64_t size);
  /// Writes the rest of the data, and syncs the file.
  void finish();

 private:
  void write_buffer();

  File file_;
  int64_t written_ = 0;
  int64_t begun_ = 0; // up to here begin_sync was called
  std::unique_ptr<char, decltype(&std::free)> buffer_{nullptr, &std::free}; // if direct
  int64_t buffered_ = 0;
};

/// Holds the folder at a path open, to find out whether another folder has taken its place.
class Folder {
 public:
  explicit Folder(const Path& path);
  /// Throws CheckpointError if the path leads to another folder by now. Call this after a file in
  /// the folder was opened, and before the file is trusted.
  void check_not_replaced() const;
  /// Equal for two paths of the same folder.
  std::pair<int64_t, int64_t> identity() const;

 private:
  Path path_;
  Fd fd_;
};

bool path_exists(const Path& path);
bool is_folder(const Path& path);
/// Returns true if the path itself is a symbolic link.
bool is_link(const Path& path);
/// Returns the path that a symbolic link has. Empty if there is no such link.
std::string link_target(const Path& link);
/// Returns the names in a folder, sorted. Empty if there is no such folder.
std::vector<std::string> list_folder(const Path& folder);
/// Returns when the file, or anything in the folder, was last changed, in seconds since 1970. 0 if
/// the path does not exist.
int64_t changed_at(const Path& path);

/// It is no error if the folder exists already.
void make_folder(const Path& folder);
/// Makes the folder and its parents, and syncs them, so that they survive a crash.
void make_folders(const Path& folder);
/// Removes a file, or a folder with its contents. It is no error if they do not exist.
void remove_tree(const Path& path);
void rename_path(const Path& from, const Path& to);
/// Syncs the names in a folder, so that new and changed ones survive a crash.
void sync_folder(const Path& folder);

/// Throws CheckpointError if the file has more than `limit` bytes.
std::string read_text(const Path& path, int64_t limit = int64_t{1} << 30);
/// Writes and syncs a temporary file, then renames it: readers never see a part of the text.
void write_text(const Path& path, std::string_view text);

/// Tests set this. It is called before system calls that change the file system, with the name of
/// the call as strace shows it ("write", "rename") and the path. May throw, or never return.
extern std::function<void(const char* operation, const Path& path)> before_change;

[[noreturn]] void throw_system_error(const char* doing, const Path& path, int error);

} // namespace fsdp::detail
