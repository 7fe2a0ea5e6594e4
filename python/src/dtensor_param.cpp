#include "dtensor_param.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/version.h>

#include <optional>
#include <utility>

namespace fsdp::python {

namespace {

/// What is needed of torch.distributed.tensor. Lives as long as the process.
struct DTensorClass {
  py::object type;
  py::object make;
  py::object local = py::str("_local_tensor");
  py::object spec = py::str("_spec");
  py::object keywords = py::make_tuple(py::str("requires_grad"));
};

DTensorClass*& known_class() {
  static DTensorClass* known = nullptr;
  return known;
}

bool is_dtensor(PyObject* object) {
  return PyObject_IsInstance(object, known_class()->type.ptr()) == 1;
}

at::Tensor local_of(PyObject* dtensor) {
  const auto local = checked(PyObject_GetAttr(dtensor, known_class()->local.ptr()));
  TORCH_CHECK_TYPE(
      THPVariable_Check(local.ptr()),
      "[fully_shard] the _local_tensor of a parameter or gradient is a ",
      Py_TYPE(local.ptr())->tp_name, ", not a tensor");
  return THPVariable_Unpack(local.ptr());
}

/// Returns an alias of `shard` with a storage and an offset of its own. Otherwise async_save, which
/// copies a local tensor's storage, would copy the whole group.
at::Tensor with_own_storage(const at::Tensor& shard) {
  const c10::InferenceMode not_inference(false);
  auto alias = shard.is_meta() || shard.numel() == 0
                   ? at::empty(shard.sizes(), shard.options())
                   : at::from_blob(
                         shard.data_ptr(), shard.sizes(), shard.strides(), [shard](void*) {},
                         shard.options());
  alias.unsafeGetTensorImpl()->set_version_counter(shard.unsafeGetTensorImpl()->version_counter());
  return alias;
}

/// A DTensor with the placements of `like`.
at::Tensor make_dtensor(const at::Tensor& local, PyObject* like) {
  const auto& dtensor = *known_class();
  const auto spec = checked(PyObject_GetAttr(like, dtensor.spec.ptr()));
  const auto object = wrapped(local);
  PyObject* arguments[] = {dtensor.type.ptr(), object.ptr(), spec.ptr(), Py_False};
  const auto made =
      checked(PyObject_Vectorcall(dtensor.make.ptr(), arguments, 3, dtensor.keywords.ptr()));
  return THPVariable_Unpack(made.ptr());
}

} // namespace

void set_dtensor_class(py::object dtensor, py::object make) {
  known_class() = new DTensorClass{std::move(dtensor), std::move(make)};
}

at::Tensor plain(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python)
             ? at::empty(tensor.sizes(), tensor.options()).copy_(tensor)
             : tensor;
}

void Site::set(PyObject* object) const {
  if (PyDict_Check(holder.ptr())) {
    if (PyDict_SetItem(holder.ptr(), name.ptr(), object) != 0) {
      throw_python_error();
    }
  } else if (const auto module = checked(PyObject_CallNoArgs(holder.ptr())); !module.is_none()) {
    module.attr(py::handle(name.ptr())) = py::handle(object);
  }
}

PyObject* Site::get() const {
  if (PyDict_Check(holder.ptr())) {
    return PyDict_GetItemWithError(holder.ptr(), name.ptr());
  }
  const auto module = checked(PyObject_CallNoArgs(holder.ptr()));
  return module.is_none() ? nullptr
                          : PyDict_GetItemWithError(module.attr("_parameters").ptr(), name.ptr());
}

DTensorParam::DTensorParam(
    const std::string& name,
    py::object whole,
    py::object pieces,
    py::object dtensor,
    std::vector<Site> sites)
    : name_(name),
      whole_(std::move(whole)),
      pieces_(pieces.is_none() ? std::nullopt : std::optional<Reference>(std::move(pieces))),
      dtensor_(std::move(dtensor)),
      sites_(std::move(sites)) {}

const at::Tensor& DTensorParam::tensor() const {
  return THPVariable_Unpack(dtensor_.ptr());
}

std::shared_ptr<void> DTensorParam::begin() const {
  return std::make_shared<Locked>();
}

const char* DTensorParam::way_out() const {
  return "Call it from inside that forward, or unshard() the module that owns it first. To compute "
         "with the shard itself, use the to_local() of the DTensor that the module has outside of "
         "forward";
}

void DTensorParam::add_grad(const at::Tensor& grad) {
  const Locked locked;
  auto& sum = tensor().mutable_grad();
  if (!sum.defined()) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
    TORCH_CHECK_VALUE(
        tensor().grad_dtype().value_or(grad.scalar_type()) == grad.scalar_type(),
        "[fully_shard] parameter '", name_, "' has the grad_dtype ", *tensor().grad_dtype(),
        ", but its gradients are in ", grad.scalar_type(),
        ", the dtype of its shard; set grad_dtype to that or to None");
#endif
    sum = make_dtensor(grad, dtensor_.ptr());
    return;
  }
  const auto object = wrapped(sum);
  TORCH_CHECK_VALUE(
      is_dtensor(object.ptr()), "[fully_shard] the .grad of parameter '", name_,
      "' is not a DTensor, so a gradient cannot be added to it; set it to None");
  const auto local = local_of(object.ptr());
  TORCH_CHECK_VALUE(
      local.sizes() == grad.sizes(), "[fully_shard] the .grad of parameter '", name_,
      "' has a local tensor of sizes ", local.sizes(),
      ", so a gradient of the shard, which has sizes ", grad.sizes(),
      ", cannot be added to it; set it to None");
  local.add_(grad);
}

at::Tensor DTensorParam::leaf(const at::Tensor& whole) {
  if (!leaf_ && !pieces_) {
    return {};
  }
  const Locked locked;
  if (!leaf_) {
    leaf_.emplace(pieces_->handle().attr("leaf")(whole));
  }
  auto leaf = THPVariable_Unpack(leaf_->ptr());
  if (leaf.requires_grad() != tensor().requires_grad()) {
    leaf.set_requires_grad(!leaf.requires_grad());
  }
  return leaf;
}

at::Tensor DTensorParam::grad_of_whole(const at::Tensor& grad) const {
  if (!pieces_) {
    return plain(grad);
  }
  const Locked locked;
  return plain(pieces_->handle().attr("grad")(grad).cast<at::Tensor>());
}

at::Tensor DTensorParam::local(const at::Tensor& grad) const {
  if (!grad.defined()) {
    return grad;
  }
  const Locked locked;
  const auto object = wrapped(grad);
  return is_dtensor(object.ptr()) ? local_of(object.ptr()) : grad;
}

void DTensorParam::shown(detail::Face face) {
  const Locked locked;
  if (face == detail::Face::Sharded) {
    put(dtensor_.ptr());
  } else {
    put(leaf_ ? leaf_->ptr() : whole_.ptr());
  }
}

void DTensorParam::put(PyObject* object) const {
  for (const auto& site : sites_) {
    site.set(object);
  }
}

/// What the first module has in its `_parameters`. Null if the user has removed it.
PyObject* DTensorParam::registered() const {
  return sites_.front().get();
}

void DTensorParam::attached(const at::Tensor& shard) {
  const Locked locked;
  take_registered();
  const auto local = with_own_storage(shard);
  if (PyObject_SetAttr(dtensor_.ptr(), known_class()->local.ptr(), wrapped(local).ptr()) != 0) {
    throw_python_error();
  }
  follow(local, shard);
  tensor().unsafeGetTensorImpl()->set_storage_offset(0);
}

/// Holds the DTensor that the user has put into the modules.
void DTensorParam::take_registered() {
  auto* now = registered();
  if (now && now != whole_.ptr() && now != dtensor_.ptr()) {
    dtensor_ = Reference(py::reinterpret_borrow<py::object>(now));
  }
  put(dtensor_.ptr());
  leaf_.reset(); // of other memory
}

at::Tensor DTensorParam::current_local() const {
  return local_of(dtensor_.ptr());
}

void DTensorParam::follow(const at::Tensor& local, const at::Tensor& shard) {
  local_ = local;
  impl_ = tensor().unsafeGetTensorImpl();
  if (!impl_->is_inference()) { // what Module.to makes in inference mode has no version
    impl_->set_version_counter(shard.unsafeGetTensorImpl()->version_counter());
  }
}

at::Tensor DTensorParam::replaced_local() const {
  auto* now = registered();
  if (!now || now == whole_.ptr()) {
    return {};
  }
  const bool is_same = now == dtensor_.ptr(); // as in almost every call
  TORCH_CHECK_VALUE(
      is_same || is_dtensor(now), "[fully_shard] parameter '", name_, "' was replaced by a ",
      Py_TYPE(now)->tp_name,
      ", but is a DTensor outside of forward; give it one (distribute_tensor), or replace it "
      "before fully_shard");
  TORCH_CHECK_VALUE(
      is_same || THPVariable_Unpack(now).is_leaf(), "[fully_shard] parameter '", name_,
      "' was replaced by the result of a computation, which would get no gradient (as "
      "torch.func.functional_call does); detach it, or compute it inside of forward");
  auto local = local_of(now);
  const bool is_attached =
      is_same && tensor().unsafeGetTensorImpl() == impl_ && local.is_same(local_);
  return is_attached ? at::Tensor() : local;
}

/// Throws if somebody gave an extension to a shard that is a plain tensor.
void DTensorParam::check_not_extended() const {
  const auto local = wrapped(local_);
  auto** members = _PyObject_GetDictPtr(local.ptr());
  TORCH_CHECK_NOT_IMPLEMENTED(
      !members || !*members || !PyDict_GetItemString(*members, "fsdp_pre_all_gather"),
      "[fully_shard] the shard of parameter '", name_,
      "' was given an fsdp_pre_all_gather of its own, but is a plain tensor; make the parameter a "
      "tensor subclass with this function before fully_shard");
}

at::Tensor DTensorParam::replacement() const {
  const Locked locked;
  check_not_extended();
  const auto local = replaced_local();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !local.defined() || !local.key_set().has(c10::DispatchKey::Python),
      "[fully_shard] the shard of parameter '", name_,
      "' was replaced by a tensor subclass; make the parameter one before fully_shard");
  return local.defined() ? local.detach() : local;
}

} // namespace fsdp::python
