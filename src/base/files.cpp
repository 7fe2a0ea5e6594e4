#include "base/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/check.h"

namespace fsdp::detail {

std::function<void(const char* operation, const Path& path)> before_change;

namespace {

void changing(const char* operation, const Path& path) {
  if (before_change) {
    before_change(operation, path);
  }
}

int open_or_throw(const Path& path, int flags, const char* doing) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  if (fd < 0) {
    throw_system_error(doing, path, errno);
  }
  return fd;
}

struct stat status_of(const Fd& fd, const Path& path) {
  struct stat status{};
  if (fstat(fd.get(), &status) != 0) {
    throw_system_error("looked at", path, errno);
  }
  return status;
}

} // namespace

void throw_system_error(const char* doing, const Path& path, int error) {
  FSDP_THROW(
      CheckpointError, path.string(), " cannot be ", doing, ": ", std::strerror(error), " (errno ",
      error, ")");
}

File File::open(const Path& path) {
  Fd fd(open_or_throw(path, O_RDONLY | O_NONBLOCK, "opened"));
  FSDP_CHECK_AS(
      CheckpointError, S_ISREG(status_of(fd, path).st_mode), path.string(), " is not a file");
  return {path, std::move(fd)};
}

File File::create(const Path& path) {
  changing("open", path);
  Fd fd(open_or_throw(path, O_RDWR | O_CREAT, "made"));
  return {path, std::move(fd)};
}

int64_t File::size() const {
  return status_of(fd_, path_).st_size;
}

File::Version File::version() const {
  const auto status = status_of(fd_, path_);
  return {
      static_cast<int64_t>(status.st_dev), static_cast<int64_t>(status.st_ino), status.st_size,
      status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
}

void File::read(int64_t offset, void* data, int64_t size) const {
  auto* bytes = static_cast<char*>(data);
  for (int64_t done = 0; done < size;) {
    const auto count =
        pread(fd_.get(), bytes + done, static_cast<size_t>(size - done), offset + done);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      throw_system_error("read", path_, errno);
    }
    FSDP_CHECK_AS(
        CheckpointError, count > 0, path_.string(), " ends at byte ", offset + done, ", but ",
        size - done, " more are needed: it is truncated");
    done += count;
  }
}

void File::write(int64_t offset, const void* data, int64_t size) const {
  changing("write", path_);
  const auto* bytes = static_cast<const char*>(data);
  for (int64_t done = 0; done < size;) {
    const auto count =
        pwrite(fd_.get(), bytes + done, static_cast<size_t>(size - done), offset + done);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count <= 0) {
      throw_system_error("written", path_, count < 0 ? errno : ENOSPC);
    }
    done += count;
  }
}

void File::resize(int64_t size) const {
  changing("ftruncate", path_);
  if (ftruncate(fd_.get(), size) != 0) {
    throw_system_error("made larger", path_, errno);
  }
}

void File::sync() const {
  changing("fsync", path_);
  if (fsync(fd_.get()) != 0) {
    throw_system_error("synced", path_, errno);
  }
}

void File::begin_sync(int64_t offset, int64_t size) const {
  (void)sync_file_range(fd_.get(), offset, size, SYNC_FILE_RANGE_WRITE);
}

bool File::set_direct(bool direct) const {
  const int flags = fcntl(fd_.get(), F_GETFL);
  return flags >= 0 &&
         fcntl(fd_.get(), F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

bool File::try_lock() const {
  return flock(fd_.get(), LOCK_EX | LOCK_NB) == 0;
}

namespace {

constexpr int64_t kBufferBytes = 4 << 20;
constexpr size_t kPageBytes = 4096;

} // namespace

FileWriter::FileWriter(const Path& path, bool direct) : file_(File::create(path)) {
  if (direct && file_.set_direct(true)) {
    buffer_.reset(static_cast<char*>(std::aligned_alloc(kPageBytes, kBufferBytes)));
    TORCH_CHECK(buffer_, "no memory for a buffer of ", kBufferBytes, " bytes");
  }
}

void FileWriter::append(const void* data, int64_t size) {
  const auto* bytes = static_cast<const char*>(data);
  if (!buffer_) {
    file_.write(written_, bytes, size);
    written_ += size;
    if (written_ - begun_ >= kBufferBytes) {
      file_.begin_sync(begun_, written_ - begun_);
      begun_ = written_;
    }
    return;
  }
  while (size > 0) {
    const auto count = std::min(size, kBufferBytes - buffered_);
    std::memcpy(buffer_.get() + buffered_, bytes, static_cast<size_t>(count));
    buffered_ += count;
    bytes += count;
    size -= count;
    if (buffered_ == kBufferBytes) {
      write_buffer();
    }
  }
}

void FileWriter::write_buffer() {
  try {
    file_.write(written_, buffer_.get(), buffered_);
  } catch (const CheckpointError&) {
    // Some file systems refuse direct writes only now. On a full disk, a write may also stop within
    // a page, after which the rest is not whole pages. So write again through the page cache.
    file_.set_direct(false);
    file_.write(written_, buffer_.get(), buffered_);
  }
  written_ += buffered_;
  buffered_ = 0;
}

void FileWriter::finish() {
  if (buffered_ > 0) {
    file_.set_direct(false);
    write_buffer();
  }
  file_.sync();
}

Folder::Folder(const Path& path)
    : path_(path.empty() ? "." : path), fd_(open_or_throw(path_, O_PATH | O_DIRECTORY, "opened")) {}

void Folder::check_not_replaced() const {
  const auto mine = status_of(fd_, path_);
  struct stat theirs{};
  FSDP_CHECK_AS(
      CheckpointError,
      stat(path_.c_str(), &theirs) == 0 && theirs.st_dev == mine.st_dev &&
          theirs.st_ino == mine.st_ino,
      path_.string(), " was replaced by another while it was read: try again");
}

std::pair<int64_t, int64_t> Folder::identity() const {
  const auto status = status_of(fd_, path_);
  return {static_cast<int64_t>(status.st_dev), static_cast<int64_t>(status.st_ino)};
}

bool path_exists(const Path& path) {
  struct stat info{};
  return lstat(path.c_str(), &info) == 0;
}

bool is_folder(const Path& path) {
  struct stat info{};
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

bool is_link(const Path& path) {
  struct stat info{};
  return lstat(path.c_str(), &info) == 0 && S_ISLNK(info.st_mode);
}

std::string link_target(const Path& link) {
  char target[4096];
  const auto length = readlink(link.c_str(), target, sizeof(target));
  return length > 0 ? std::string(target, static_cast<size_t>(length)) : std::string();
}

std::vector<std::string> list_folder(const Path& folder) {
  DIR* opened = opendir(folder.c_str());
  if (!opened) {
    if (errno == ENOENT) {
      return {};
    }
    throw_system_error("listed", folder, errno);
  }
  std::vector<std::string> names;
  while (const auto* entry = readdir(opened)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") {
      names.push_back(name);
    }
  }
  closedir(opened);
  std::sort(names.begin(), names.end());
  return names;
}

int64_t changed_at(const Path& path) {
  struct stat info{};
  if (lstat(path.c_str(), &info) != 0) {
    return 0;
  }
  int64_t newest = info.st_mtime;
  if (S_ISDIR(info.st_mode)) {
    for (const auto& name : list_folder(path)) {
      newest = std::max(newest, changed_at(path / name));
    }
  }
  return newest;
}

void make_folder(const Path& folder) {
  changing("mkdir", folder);
  if (mkdir(folder.c_str(), 0777) != 0 && !(errno == EEXIST && is_folder(folder))) {
    throw_system_error("made", folder, errno);
  }
}

void make_folders(const Path& folder) {
  if (folder.empty() || is_folder(folder)) {
    return;
  }
  make_folders(folder.parent_path());
  make_folder(folder);
  sync_folder(folder.parent_path());
}

void remove_tree(const Path& path) {
  struct stat info{};
  if (lstat(path.c_str(), &info) != 0) {
    return;
  }
  const bool folder = S_ISDIR(info.st_mode);
  if (folder) {
    for (const auto& name : list_folder(path)) {
      remove_tree(path / name);
    }
  }
  changing(folder ? "rmdir" : "unlink", path);
  if ((folder ? rmdir(path.c_str()) : unlink(path.c_str())) != 0 && errno != ENOENT) {
    throw_system_error("removed", path, errno);
  }
}

void rename_path(const Path& from, const Path& to) {
  changing("rename", to);
  if (rename(from.c_str(), to.c_str()) != 0) {
    throw_system_error(("renamed to " + to.string()).c_str(), from, errno);
  }
}

void sync_folder(const Path& folder) {
  changing("fsync", folder);
  const auto path = folder.empty() ? Path(".") : folder;
  const Fd fd(open_or_throw(path, O_RDONLY | O_DIRECTORY, "opened"));
  // Some file systems cannot sync folders, and return EINVAL.
  if (fsync(fd.get()) != 0 && errno != EINVAL) {
    throw_system_error("synced", path, errno);
  }
}

std::string read_text(const Path& path, int64_t limit) {
  const auto file = File::open(path);
  const auto size = file.size();
  FSDP_CHECK_AS(
      CheckpointError, size <= limit, path.string(), " has ", size, " bytes, more than the ", limit,
      " that it may have");
  std::string text(static_cast<size_t>(size), '\0');
  file.read(0, text.data(), size);
  return text;
}

void write_text(const Path& path, std::string_view text) {
  // Several threads or processes may write to `path` at once, so each has its own temporary file.
  static std::atomic<uint64_t> number{0};
  const Path aside = c10::str(path.string(), ".", getpid(), "-", number.fetch_add(1), ".aside");
  try {
    const auto file = File::create(aside);
    file.write(0, text.data(), static_cast<int64_t>(text.size()));
    file.sync();
    rename_path(aside, path);
  } catch (const CheckpointError&) {
    unlink(aside.c_str());
    throw;
  }
}

} // namespace fsdp::detail
