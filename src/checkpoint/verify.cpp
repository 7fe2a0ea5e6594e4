#include <algorithm>
#include <map>
#include <set>

#include <fsdp/checkpoint_tools.h>

#include "base/check.h"
#include "checkpoint/catalog.h"
#include "checkpoint/dcp.h"
#include "checkpoint/manifest.h"
#include "checkpoint/reader.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/writer.h"

namespace fsdp {

namespace {

using namespace detail;

/// A piece, and its tensor.
struct PieceOf {
  const StoredTensor* tensor = nullptr;
  const StoredPiece* piece = nullptr;
};

class Verifier {
 public:
  explicit Verifier(Path path) {
    report_.path = std::move(path);
  }

  CheckpointReport run() {
    const auto& path = report_.path;
    if (!is_folder(path)) {
      verify_file(path);
    } else if (const auto kind = kind_of(path); kind == FolderKind::manifest) {
      if (attempt([&] { catalog_ = read_manifest(path / kManifestName); })) {
        verify_ours();
      }
      return std::move(report_);
    } else if (kind == FolderKind::dcp) {
      if (attempt([&] { catalog_ = read_dcp(path); })) {
        verify_dcp();
      }
      return std::move(report_);
    } else {
      for (const auto& name : safetensors_in(path)) {
        verify_file(path / name);
      }
    }
    // The files together must make a complete checkpoint.
    attempt([&] { report_.num_tensors = static_cast<int64_t>(open_catalog(path).tensors.size()); });
    return std::move(report_);
  }

 private:
  /// Runs `step`. If it throws CheckpointError, records the problem and returns false.
  template <class Step>
  bool attempt(const Step& step) {
    try {
      step();
      return true;
    } catch (const CheckpointError&) {
      problem(current_exception_text());
      return false;
    }
  }

  template <class... Pieces>
  void problem(const Pieces&... pieces) {
    auto text = c10::str(pieces...);
    if (known_.insert(text).second) {
      report_.problems.push_back(std::move(text));
    }
  }

  static std::vector<std::string> safetensors_in(const Path& folder) {
    auto names = list_folder(folder);
    std::erase_if(names, [](const auto& name) { return Path(name).extension() != ".safetensors"; });
    return names;
  }

  /// Checks a file without a manifest: its header, and whether all of the file can be read.
  void verify_file(const Path& path) {
    ++report_.num_files;
    attempt([&] {
      const auto file = File::open(path);
      for (const auto& entry : read_safetensors(file).entries) {
        attempt([&] { read_blocks(file, entry.offset, entry.bytes(), {}, entry.name); });
      }
    });
  }

  /// Checks the coverage of the tensors. Returns their pieces by file, in the order of the file.
  std::map<std::string, std::vector<PieceOf>> pieces_by_file() {
    catalog_.folder = report_.path;
    report_.num_tensors = static_cast<int64_t>(catalog_.tensors.size());
    std::map<std::string, std::vector<PieceOf>> files;
    for (const auto& tensor : catalog_.tensors) {
      attempt([&] { check_coverage(catalog_, tensor); });
      for (const auto& piece : tensor.pieces) {
        files[piece.file].push_back({&tensor, &piece});
      }
    }
    for (auto& [name, pieces] : files) {
      std::sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) {
        return a.piece->offset < b.piece->offset;
      });
    }
    return files;
  }

  void verify_ours() {
    const auto files = pieces_by_file();
    for (const auto& [name, pieces] : files) {
      verify_pieces(report_.path / name, pieces);
    }
    for (const auto& name : safetensors_in(report_.path)) {
      if (!files.contains(name)) { // other programs read every file that they find
        problem((report_.path / name).string(), ": is not in the manifest");
      }
    }
  }

  void verify_dcp() {
    auto files = pieces_by_file();
    std::map<std::string, std::vector<const StoredObject*>> objects;
    for (const auto& object : catalog_.objects) {
      objects[object.file].push_back(&object);
    }
    for (const auto& [name, bytes] : catalog_.least_bytes) {
      files[name]; // one without tensors is verified, too
    }
    for (const auto& [name, pieces] : files) {
      ++report_.num_files;
      attempt([&, &name = name, &pieces = pieces] {
        const auto file = File::open(report_.path / name);
        attempt([&] { check_fits(file, catalog_.least_bytes.at(name)); });
        for (const auto& [tensor, piece] : pieces) {
          attempt([&, tensor = tensor, piece = piece] { verify_archive(file, *tensor, *piece); });
        }
        for (const auto* object : objects[name]) {
          attempt([&] { check_dcp_object(file, *object); });
        }
      });
    }
  }

  void verify_archive(const File& file, const StoredTensor& tensor, const StoredPiece& piece) {
    const auto found = open_dcp_piece(file, tensor, piece);
    const auto bytes = tensor_bytes(piece.box.sizes, tensor.dtype).value();
    report_.bytes += bytes;
    report_.unchecked_bytes += found.crc ? 0 : bytes;
    check_dcp_piece(file, tensor, found);
  }

  void verify_pieces(const Path& path, const std::vector<PieceOf>& pieces) {
    ++report_.num_files;
    attempt([&] {
      const auto file = File::open(path);
      const auto file_bytes = file.size();
      attempt([&] { compare_header(file, pieces); });
      for (const auto& [tensor, piece] : pieces) {
        attempt([&, tensor = tensor, piece = piece] {
          check_fits(path, file_bytes, *tensor, *piece);
          const auto bytes = tensor_bytes(piece->box.sizes, tensor->dtype).value();
          read_blocks(file, piece->offset, bytes, piece->crcs, tensor->name);
        });
      }
    });
  }

  /// Compares a file's header with the manifest: we read by the manifest, but other programs read
  /// by the header.
  void compare_header(const File& file, const std::vector<PieceOf>& pieces) {
    const auto name = file.path().string();
    const auto header = read_safetensors(file);
    std::map<std::string_view, const SafetensorsEntry*> entries;
    for (const auto& entry : header.entries) {
      entries[entry.name] = &entry;
    }
    std::map<std::string, std::vector<int64_t>> offsets;
    for (const auto& [tensor, piece] : pieces) {
      offsets[tensor->name] = piece->box.offsets;
      const auto found = entries.find(tensor->name);
      if (found == entries.end() || found->second->offset != piece->offset ||
          found->second->dtype != tensor->dtype || found->second->sizes != piece->box.sizes) {
        problem(
            name, ", tensor '", tensor->name,
            "': the file's header says otherwise than the manifest");
      }
      if (found != entries.end()) {
        entries.erase(found);
      }
    }
    for (const auto& [tensor, entry] : entries) {
      problem(name, ", tensor '", tensor, "': is not in the manifest");
    }
    // This metadata tells torch's distributed checkpoint where in the whole tensors the pieces lie.
    for (const auto& [key, text] : shard_header({}, offsets, name).metadata) {
      const auto found = header.metadata.find(key);
      if (found == header.metadata.end() || found->second != text) {
        problem(name, ": the header's ", key, " is not that of the manifest's pieces");
      }
    }
  }

  /// `crcs` is empty if there are no checksums.
  void read_blocks(
      const File& file,
      int64_t offset,
      int64_t bytes,
      const std::vector<uint32_t>& crcs,
      const std::string& tensor) {
    for (int64_t done = 0; done < bytes; done += kBlockBytes) {
      const auto size = std::min(kBlockBytes, bytes - done);
      block_.resize(std::max(block_.size(), static_cast<size_t>(size)));
      file.read(offset + done, block_.data(), size);
      report_.bytes += size;
      if (crcs.empty()) {
        report_.unchecked_bytes += size;
        continue;
      }
      const auto crc = crcs[static_cast<size_t>(done / kBlockBytes)];
      attempt([&] {
        check_block(
            file.path(), tensor, offset + done, {block_.data(), static_cast<size_t>(size)}, crc);
      });
    }
  }

  Catalog catalog_;
  CheckpointReport report_;
  std::set<std::string> known_; // the problems in the report
  std::vector<char> block_;
};

} // namespace

CheckpointReport verify_checkpoint(const std::filesystem::path& path) {
  const auto checkpoint = find_checkpoint(path);
  const Folder opened(is_folder(checkpoint) ? checkpoint : checkpoint.parent_path());
  auto report = Verifier(checkpoint).run();
  opened.check_not_replaced(); // else problems may come from a mix of two checkpoints
  return report;
}

} // namespace fsdp
