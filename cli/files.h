#pragma once

#include <filesystem>
#include <optional>
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

/// All bytes of a file. Empty if it cannot be read; errno says why.
std::optional<std::string> read_file(const std::filesystem::path& path);
/// Replaces a small file atomically: readers see the old text or the new one, never a part of it.
/// Throws CheckpointError and leaves the old file if that fails.
void write_file(const std::filesystem::path& path, const std::string& text);
/// Throws the CheckpointError of a file that cannot be written; errno says why.
[[noreturn]] void throw_cannot_write(const std::filesystem::path& path);
/// Makes a folder and the folders above it. Throws CheckpointError if that fails.
void make_folders(const std::filesystem::path& folder);

} // namespace fsdp::cli
