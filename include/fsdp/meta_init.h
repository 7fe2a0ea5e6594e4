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

/// While it exists, tensors that the calling thread makes without naming a device are on the meta
/// device. So modules have shapes but no memory, as with Python's `torch.device("meta")`. Shard
/// them, then call to_empty and init_parameters, or load a checkpoint. Operators that LibTorch
/// does not support on meta tensors throw (polar, randperm, item, at::tensor of a list): name the
/// CPU as the device of their inputs. Tensors that were made with a device keep it, and their
/// values. So do torch::tensor({...}) and tensors that are computed from others.
class FSDP_API MetaInit {
 public:
  MetaInit();
  ~MetaInit();
  MetaInit(const MetaInit&) = delete;
  MetaInit& operator=(const MetaInit&) = delete;

 private:
  std::unique_ptr<detail::OpInterceptor> interceptor_;
};

/// Allocates memory on `device` for all parameters and buffers that are on the meta device. For a
/// sharded parameter this is only this rank's shard. Floating point memory is filled with NaN.
/// The first forward throws if a parameter or buffer has not been written to by then, and names
/// it.
FSDP_API void to_empty(ModuleRef module, c10::Device device);
/// Does the same, each tensor on the device where it belongs: offloaded shards on the host, all
/// other tensors on the device of the mesh. Throws ValueError if `module` is not sharded.
FSDP_API void to_empty(ModuleRef module);

/// Calls `fill(fqn, param)` for every parameter at and below `module`. `param` is the whole
/// parameter, and `fill` must write all of it in place. Only this rank's part is kept, and only
/// one whole parameter is in memory at a time. Random numbers that `fill` draws without a
/// generator of its own depend only on `seed` and the name, so the values are the same for every
/// world size. A shared parameter is filled once, under its first name. A parameter that `fill`
/// does not write to stays as it was. Not collective.
FSDP_API void init_parameters(
    ModuleRef module,
    const std::function<void(const std::string& fqn, at::Tensor& param)>& fill,
    uint64_t seed = 0);

} // namespace fsdp
