#pragma once

#include <vector>

#include "interpreter.h"

namespace fsdp::python {

/// The tensors in the arguments or results of a Python call, in tuples, lists, dicts, dataclasses
/// and the nodes that are registered with torch.utils._pytree.
class TensorTree {
 public:
  void add(PyObject* root);

  /// They may be replaced.
  std::vector<at::Tensor*> pointers();
  bool was_replaced() const;
  /// Returns a copy of the next root, in the order of `add`, with the tensors as they are now.
  /// Objects without a new tensor are not copied.
  py::object rebuilt(PyObject* root);

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<at::TensorImpl*> given_;
  size_t next_ = 0;
};

/// Sets the functions that know more kinds of nodes. `children(node)` returns its children and
/// what to rebuild it with, or None for a leaf. `rebuild(node, children, context)` returns a copy.
void set_tree_functions(py::object children, py::object rebuild);

} // namespace fsdp::python
