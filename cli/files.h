#pragma once

#include <filesystem>
#include <string>

namespace fsdp::cli {

// By hand, in part: one supported torch exports its own, broken parts of
// std::filesystem.

/// A regular one, or a link to it.
bool is_file(const std::filesystem::path& path);
/// The same of a folder.
bool is_folder(const std::filesystem::path& path);
/// As the same file is called from any folder; as it is where there is none.
std::string real_path(const std::string& path);
/// Where a shell would find the program; empty where it would not.
std::string find_in_path(const std::string& program);

/// Writes all of a small file or leaves what was there, so that whoever looks
/// meanwhile never sees half of it. False where that failed: errno says why.
bool write_aside(const std::filesystem::path& path, const std::string& text);

} // namespace fsdp::cli
