#pragma once

#include <filesystem>
#include <string>

namespace fsdp::cli {

// These functions use system calls: one supported torch exports broken copies of some functions
// of std::filesystem.

/// Returns true for a regular file, or a link to one.
bool is_file(const std::filesystem::path& path);
/// Returns true for a folder, or a link to one.
bool is_folder(const std::filesystem::path& path);
/// The absolute path without links. Returns `path` unchanged if nothing exists there.
std::string real_path(const std::string& path);
/// The path at which a shell would find `program`. Empty if there is none.
std::string find_in_path(const std::string& program);

/// Replaces a small file atomically: readers see the old text or the new one, never a part of it.
/// Returns false and leaves the old file if that fails; errno says why.
bool replace_file(const std::filesystem::path& path, const std::string& text);

} // namespace fsdp::cli
