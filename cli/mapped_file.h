#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "cli/check.h"

namespace fsdp::cli {

/// A file that is mapped into memory.
class MappedFile {
 public:
  /// Throws ConfigError that begins with `about` if the file is empty or cannot be read.
  MappedFile(const std::string& path, const std::string& about) : path_(path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    check_config(fd >= 0, about, path, " cannot be read: ", std::strerror(errno));
    struct stat status{};
    const bool known = fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
    size_ = known ? static_cast<int64_t>(status.st_size) : 0;
    void* const mapped =
        size_ > 0 ? mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_PRIVATE, fd, 0)
                  : MAP_FAILED;
    close(fd);
    check_config(size_ > 0, about, path, " is empty, or not a file");
    check_config(mapped != MAP_FAILED, about, path, " cannot be mapped into memory");
    data_ = static_cast<const char*>(mapped);
  }
  ~MappedFile() {
    munmap(const_cast<char*>(data_), static_cast<size_t>(size_));
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const {
    return path_;
  }
  int64_t size() const {
    return size_;
  }
  const char* data() const {
    return data_;
  }
  std::string_view text() const {
    return {data_, static_cast<size_t>(size_)};
  }
  /// The number of type T at a byte, which must be inside of the file.
  template <class T>
  T at(int64_t byte) const {
    T value;
    std::memcpy(&value, data_ + byte, sizeof(T));
    return value;
  }

 private:
  const std::string path_;
  int64_t size_ = 0;
  const char* data_ = nullptr;
};

} // namespace fsdp::cli
