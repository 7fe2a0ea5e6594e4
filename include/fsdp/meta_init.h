#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <fsdp/export.h>
#include <fsdp/module_ref.h>

namespace fsdp {

namespace detail {
class OpInterceptor;
}

/// While it lives, tensors that this thread makes without naming a device are
/// on the meta device: modules have shapes but no memory. Shard them, then call
/// to_empty and init_parameters, or load a checkpoint. What LibTorch cannot do
/// there (polar, randperm, item, at::tensor of a list) throws: name the CPU for
/// its inputs. Tensors that were given a device keep it, and their values; so do
/// torch::tensor({...}) and what is made of other tensors.
class FSDP_API MetaInit {
 public:
  MetaInit();
  ~MetaInit();
  MetaInit(const MetaInit&) = delete;
  MetaInit& operator=(const MetaInit&) = delete;

 private:
  std::unique_ptr<detail::OpInterceptor> interceptor_;
};

/// Gives what is on the meta device memory on `device`: of sharded parameters
/// this rank's shards, else all. It holds NaN; the first forward throws, and
/// names those that nobody has written to by then, buffers too.
FSDP_API void to_empty(ModuleRef module, c10::Device device);

/// Calls `fill(name, param)` for every parameter at and below `module`, with a
/// whole one to be filled in place, all of it, and keeps this rank's part. Random numbers
/// that it draws without a generator depend on `seed` and the name alone, so
/// values are the same for every world size. One whole parameter is in memory
/// at a time. A shared parameter is filled once, by its first name; one that
/// `fill` leaves alone stays as it was. Not collective.
FSDP_API void init_parameters(
    ModuleRef module,
    const std::function<void(const std::string& fqn, at::Tensor& param)>& fill,
    uint64_t seed = 0);

} // namespace fsdp
