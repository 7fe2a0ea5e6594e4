#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fsdp::test {

/// What the bytes of an input are.
enum class FuzzKind : uint8_t {
  file,     // a safetensors file
  header,   // of one with `kFuzzDataBytes`
  shard,    // the header of the second of two files of torch's distributed checkpoint
  index,    // model.safetensors.index.json, beside good.safetensors with tensors a and b
  manifest, // without its checksum, beside the two files
  // Of torch.distributed.checkpoint, beside the other files of a good folder:
  dcp_metadata, // .metadata
  dcp_archive,  // the second file of a tensor
  dcp_tensor,   // the pickle in it
  dcp_object,   // the pickle of an object
  count
};
inline constexpr size_t kFuzzDataBytes = 24;

struct FuzzInput {
  std::string what;
  FuzzKind kind;
  std::string bytes;
  bool good = false;
};

} // namespace fsdp::test
