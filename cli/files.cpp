#include "cli/files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>

#include "cli/check.h"

namespace fsdp::cli {

bool is_file(const std::filesystem::path& path) {
  struct stat info{};
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

bool is_folder(const std::filesystem::path& path) {
  struct stat info{};
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

std::string real_path(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> real(
      realpath(path.c_str(), nullptr), &std::free);
  return real ? real.get() : path;
}

std::string find_in_path(const std::string& program) {
  const char* path = std::getenv("PATH");
  const std::string folders = path ? path : "/usr/bin:/bin";
  for (size_t start = 0; start <= folders.size();) {
    const auto end = std::min(folders.find(':', start), folders.size());
    const auto candidate = folders.substr(start, end - start) + "/" + program;
    if (is_file(candidate) && access(candidate.c_str(), X_OK) == 0) {
      return candidate;
    }
    start = end + 1;
  }
  return "";
}

std::optional<std::string> read_file(const std::filesystem::path& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  try {
    std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    return file.is_open() ? std::optional(std::move(text)) : std::nullopt;
  } catch (const std::exception&) { // a folder can be opened, but not read
    return std::nullopt;
  }
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  const auto aside = path.string() + ".new";
  std::ofstream file(aside, std::ios::binary | std::ios::trunc);
  file << text << std::flush;
  const bool written = file.good();
  file.close();
  if (!written || std::rename(aside.c_str(), path.c_str()) != 0) {
    const int error = errno;
    unlink(aside.c_str()); // a partial file only takes space
    errno = error;
    throw_cannot_write(path);
  }
}

void throw_cannot_write(const std::filesystem::path& path) {
  throw_checkpoint_error(path.string(), " cannot be written: ", std::strerror(errno));
}

void make_folders(const std::filesystem::path& folder) {
  if (folder.empty() || is_folder(folder)) {
    return;
  }
  make_folders(folder.parent_path());
  if (mkdir(folder.c_str(), 0777) != 0 && !is_folder(folder)) {
    throw_checkpoint_error("cannot make the folder ", folder.string(), ": ", std::strerror(errno));
  }
}

} // namespace fsdp::cli
