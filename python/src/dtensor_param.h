#pragma once

#include <optional>
#include <string>
#include <vector>

#include "interpreter.h"
#include "param/user_param.h"

namespace fsdp::python {

// Note [Two objects for a parameter]
//
// A Python user holds a DTensor at rest, and sees a plain nn.Parameter inside forward. The plain
// one is the engine's tensor, the user's own from before fully_shard. (If that was a DTensor, of
// tensor parallelism, the engine's tensor is this rank's piece of it, and inside forward the user
// sees a DTensor again, a leaf around the piece: see _tensor_parallel.py.) The DTensor's local
// tensor has the memory of the engine's shard. To show a face is to put one or the other into the
// `_parameters` of every module that has the parameter: a shared one is shown at all its sites.
//
// - The DTensor and the shard have one version counter, because operators of DTensors move only the
//   DTensor's.
// - Only the Python object of the DTensor is held, never an at::Tensor of it: Module._apply swaps
//   tensors, which torch refuses if C++ holds one.
// - If somebody puts another DTensor into a module (load_state_dict with assign), or another local
//   tensor into the DTensor (Module.to), the engine takes it over before the next gather.

/// Where a module has a parameter. `holder` is the module's `_parameters`, or a weak reference to
/// a module that wants to know of its parameters: one with a `__setattr__` of its own, as nn.LSTM.
struct Site {
  Reference holder;
  Reference name;

  void set(PyObject* object) const;
  /// Null if there is none.
  PyObject* get() const;
};

class DTensorParam : public detail::UserParam {
 public:
  /// `name` is that of the engine's parameter, which learns its whole name in the first forward.
  /// `pieces` makes the leaf around the engine's tensor `whole`, and divides its gradients. None:
  /// modules see `whole` itself.
  DTensorParam(
      const std::string& name,
      py::object whole,
      py::object pieces,
      py::object dtensor,
      std::vector<Site> sites);

  const at::Tensor& tensor() const override;
  const char* way_out() const override;
  void add_grad(const at::Tensor& grad) override;
  std::shared_ptr<void> begin() const override;
  void shown(detail::Face face) override;
  at::Tensor leaf(const at::Tensor& whole) override;
  at::Tensor grad_of_whole(const at::Tensor& grad) const override;
  at::Tensor local(const at::Tensor& grad) const override;
  void attached(const at::Tensor& shard) override;
  at::Tensor replacement() const override;

 protected:
  /// The leaf that modules see while the parameter is whole.
  void set_leaf(Reference leaf) {
    leaf_ = std::move(leaf);
  }
  void take_registered();
  /// The tensor in the DTensor that the user holds now.
  at::Tensor current_local() const;
  /// From now on `local` is in the user's DTensor. The DTensor and the shard have one version.
  void follow(const at::Tensor& local, const at::Tensor& shard);
  /// The tensor that the user has put in the place of the one in `follow`, or an undefined one.
  at::Tensor replaced_local() const;

 private:
  void check_not_extended() const;
  PyObject* registered() const;
  void put(PyObject* object) const;

  const std::string& name_; // of the engine's parameter, which owns this
  const Reference whole_;
  const std::optional<Reference> pieces_;
  std::optional<Reference> leaf_;
  Reference dtensor_;
  at::TensorImpl* impl_ = nullptr; // of the DTensor, when the shard was attached
  at::Tensor local_;               // inside of the DTensor, since then
  const std::vector<Site> sites_;
};

/// A wrapper subclass has no memory of its own. Returns a plain tensor with its values; others as
/// they are.
at::Tensor plain(const at::Tensor& tensor);

/// Sets the class DTensor, and the function that makes one of a local tensor and a DTensorSpec.
void set_dtensor_class(py::object dtensor, py::object make);

} // namespace fsdp::python
