#include "opaque_param.h"

#include <algorithm>
#include <utility>

#include "param/fsdp_param.h"

namespace fsdp::python {

OpaqueParam::OpaqueParam(
    const std::string& name,
    py::object whole,
    py::object pieces,
    py::object dtensor,
    std::vector<Site> sites,
    py::object extension)
    : DTensorParam(name, std::move(whole), std::move(pieces), std::move(dtensor), std::move(sites)),
      extension_(std::move(extension)) {}

void OpaqueParam::attached(const at::Tensor& shard) {
  const Locked locked;
  take_registered();
  extension_.handle().attr("reset")();
  const auto local = current_local();
  follow(local, shard);
  local.unsafeGetTensorImpl()->set_version_counter(shard.unsafeGetTensorImpl()->version_counter());
}

at::Tensor OpaqueParam::replacement() const {
  const Locked locked;
  const auto local = replaced_local();
  return local.defined() ? detail::stand_in(local.sizes(), local.options()) : local;
}

void OpaqueParam::free_leaf() {
  const Locked locked;
  extension_.handle().attr("free")();
}

AllGatherPayload OpaqueParam::pre_all_gather(
    const at::Tensor& /*shard*/, const AllGatherInfo& /*info*/) {
  const Locked locked;
  const auto sent = extension_.handle().attr("send")(current_local()).cast<py::tuple>();
  auto tensors = sent[0].cast<std::vector<at::Tensor>>();
  std::transform(tensors.begin(), tensors.end(), tensors.begin(), plain);
  return {.tensors = std::move(tensors), .metadata = Reference(py::object(sent[1]))};
}

void OpaqueParam::post_all_gather(
    const std::vector<at::Tensor>& outputs,
    const std::any& metadata,
    const AllGatherInfo& info,
    at::Tensor& /*out*/) {
  const Locked locked;
  const auto& given = std::any_cast<const Reference&>(metadata);
  set_leaf(Reference(extension_.handle().attr("receive")(
      current_local(), outputs, given.handle(), info.param_dtype)));
}

void move_memory(const at::Tensor& from, const at::Tensor& to) {
  auto* source = from.storage().unsafeGetStorageImpl();
  auto* target = to.storage().unsafeGetStorageImpl();
  const auto bytes = source->nbytes();
  target->set_data_ptr_noswap(source->set_data_ptr(at::DataPtr(nullptr, from.device())));
  target->set_nbytes(bytes);
  source->set_nbytes(0);
}

} // namespace fsdp::python
