#pragma once

#include <optional>
#include <vector>

#include "interpreter.h"

namespace fsdp::python {

/// The tensors in the arguments or results of a Python call, in tuples, lists, dicts and
/// dataclasses. In results also those in nodes that are registered with torch.utils._pytree.
class TensorTree {
 public:
  /// Tensors of classes with a `__torch_function__` of their own are cast by it to `cast`, as
  /// the engine casts others. Only the class knows how.
  static TensorTree of_arguments(std::optional<at::ScalarType> cast) {
    return TensorTree(/*in_results=*/false, cast);
  }
  static TensorTree of_results() {
    return TensorTree(/*in_results=*/true, std::nullopt);
  }

  void add(PyObject* root);

  /// They may be replaced.
  std::vector<at::Tensor*> pointers();
  bool was_replaced() const;
  /// Returns a copy of the next root, in the order of `add`, with the tensors as they are now.
  /// Objects without a new tensor are not copied. A new tensor has the class and the attributes of
  /// the one whose place it takes.
  py::object rebuilt(PyObject* root);

 private:
  TensorTree(bool in_results, std::optional<at::ScalarType> cast)
      : in_results_(in_results), cast_(cast) {}

  const bool in_results_;
  const std::optional<at::ScalarType> cast_;
  std::vector<at::Tensor> tensors_;
  std::vector<py::object> given_; // what was in the tree, or its cast
  bool has_casts_ = false;
  size_t next_ = 0;
};

/// Sets the functions that know more kinds of nodes. `children(node, in_results)` returns its
/// children and what to rebuild it with, or None for a leaf. `rebuild(node, children, context)`
/// returns a copy.
void set_tree_functions(py::object children, py::object rebuild);

} // namespace fsdp::python
