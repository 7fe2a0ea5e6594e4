#pragma once

#include <fsdp/extension.h>

#include <any>
#include <vector>

#include "dtensor_param.h"

namespace fsdp::python {

/// A parameter whose shard is a tensor subclass, inside of the user's DTensor. Its class says what
/// a rank sends (fsdp_pre_all_gather) and what a module sees (fsdp_post_all_gather). See Note
/// [Opaque parameters] and _extension.py.
class OpaqueParam : public DTensorParam, public AllGatherExtension {
 public:
  /// `extension` is an Extension of _extension.py; the others are as in DTensorParam.
  OpaqueParam(
      const std::string& name,
      py::object whole,
      py::object pieces,
      py::object dtensor,
      std::vector<Site> sites,
      py::object extension);

  void attached(const at::Tensor& shard) override;
  at::Tensor replacement() const override;
  void free_leaf() override;

  AllGatherPayload pre_all_gather(const at::Tensor& shard, const AllGatherInfo& info) override;
  void post_all_gather(
      const std::vector<at::Tensor>& outputs,
      const std::any& metadata,
      const AllGatherInfo& info,
      at::Tensor& out) override;

 private:
  const Reference extension_;
};

/// Gives the memory of `from` to `to`, whose storage and views stay. `from` has none afterwards.
void move_memory(const at::Tensor& from, const at::Tensor& to);

} // namespace fsdp::python
