#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "process_group/socket.h"

namespace fsdp::detail {

// Files and folders by system calls, whose every failure is a CheckpointError
// that names the file. Not std::filesystem's: some torch builds export copies of
// its functions that crash, and it cannot sync.

using Path = std::filesystem::path;

/// An open file.
class File {
 public:
  /// For reading. Throws where it is no file: to open a pipe might be to wait.
  static File open(const Path& path);
  /// Makes it, or opens the one that is there, for writing.
  static File create(const Path& path);

  const Path& path() const {
    return path_;
  }
  int64_t size() const;
  /// The same as long as nobody writes to it or puts another one in its place.
  using Version = std::array<int64_t, 5>;
  Version version() const;
  /// All of it, or an error that says how much is missing.
  void read(int64_t offset, void* data, int64_t size) const;
  void write(int64_t offset, const void* data, int64_t size) const;
  void resize(int64_t size) const;
  void sync() const;
  /// A hint: the disk may begin with these bytes, so that `sync` has less to wait for.
  void begin_sync(int64_t offset, int64_t size) const;
  /// Whether writes pass by the page cache from now on, which must be of whole, aligned
  /// pages then; false where that is not to be had.
  bool set_direct(bool direct) const;
  /// Whether nobody else holds the lock; then this file does until it is closed.
  bool try_lock() const;

 private:
  File(Path path, Fd fd) : path_(std::move(path)), fd_(std::move(fd)) {}

  Path path_;
  Fd fd_;
};

/// Writes a file from its first byte to its last.
class FileWriter {
 public:
  /// `direct`: past the page cache, where that can be. It takes a fraction of the
  /// processor's time, but who reads the file next has to wait for the disk.
  FileWriter(const Path& path, bool direct);

  void append(const void* data, int64_t size);
  /// The rest, synced.
  void finish();

 private:
  void write_buffer();

  File file_;
  int64_t written_ = 0;
  int64_t begun_ = 0;                                                       // to be synced
  std::unique_ptr<char, decltype(&std::free)> buffer_{nullptr, &std::free}; // where direct
  int64_t buffered_ = 0;
};

/// A folder that was at a path, held open: it stays the same, whatever the path leads to.
class Folder {
 public:
  explicit Folder(const Path& path);
  /// Throws where the path leads to another one by now. To be called after a file was
  /// opened by that path, and before it is trusted.
  void check_not_replaced() const;

 private:
  Path path_;
  Fd fd_;
};

bool path_exists(const Path& path);
bool is_folder(const Path& path);
/// A symbolic link.
bool is_link(const Path& path);
/// Names in a folder, sorted; none where there is no folder.
std::vector<std::string> list_folder(const Path& folder);
/// The newest change of the file, or of anything in the folder, in seconds; 0
/// where it is gone.
int64_t changed_at(const Path& path);

/// Fine where it is there already.
void make_folder(const Path& folder);
/// With the folders above it, and such that they last.
void make_folders(const Path& folder);
/// A folder with all that is in it, or a file. What is gone already is fine.
void remove_tree(const Path& path);
void rename_path(const Path& from, const Path& to);
/// Makes the names in a folder last.
void sync_folder(const Path& folder);

/// Throws for files of more than `limit` bytes.
std::string read_text(const Path& path, int64_t limit = int64_t{1} << 30);
/// Written aside, synced and renamed: readers see all of it or none.
void write_text(const Path& path, std::string_view text);

/// For tests: called before everything that changes the file system, in the
/// words of strace ("write", "rename"), with the path. May throw, or never return.
extern std::function<void(const char* operation, const Path& path)> before_change;

[[noreturn]] void throw_system_error(const char* doing, const Path& path, int error);

} // namespace fsdp::detail
