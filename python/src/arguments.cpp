#include "arguments.h"

#include <utility>

namespace fsdp::python {

namespace {

/// For nodes that C++ does not know. Lives as long as the process.
struct TreeFunctions {
  py::object children;
  py::object rebuild;
};

TreeFunctions*& tree_functions() {
  static TreeFunctions* known = nullptr;
  return known;
}

/// Objects that are in every call and hold no tensors.
bool is_plain(PyObject* object) {
  return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) ||
         PyFloat_CheckExact(object) || PyUnicode_CheckExact(object);
}

/// Calls `visit(child)` for the children of a tuple, list or dict. False for anything else.
template <class Visit>
bool visit_builtin(PyObject* object, const Visit& visit) {
  if (PyTuple_CheckExact(object)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
      visit(PyTuple_GET_ITEM(object, i));
    }
  } else if (PyList_CheckExact(object)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) {
      visit(PyList_GET_ITEM(object, i));
    }
  } else if (PyDict_CheckExact(object)) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, &key, &value)) {
      visit(value);
    }
  } else {
    return false;
  }
  return true;
}

/// False for torch's own classes, and for those that only change what operators do.
bool has_own_functions(PyObject* tensor) {
  static const auto* none =
      new py::object(py::module_::import("torch._C").attr("_disabled_torch_function_impl"));
  if (THPVariable_CheckExact(tensor)) {
    return false;
  }
  const py::object functions = py::handle(tensor).attr("__torch_function__");
  return !functions.is(*none);
}

/// Gives `made` the class and the attributes of `given`. A tensor that wraps others has its own.
py::object alike(py::object made, PyObject* given) {
  if (THPVariable_Unpack(given).key_set().has(c10::DispatchKey::Python)) {
    return made;
  }
  const py::handle like = given;
  if (has_own_functions(given)) {
    made = made.attr("as_subclass")(like.get_type());
  }
  const py::dict attributes = like.attr("__dict__");
  if (!attributes.empty()) {
    made.attr("__dict__").attr("update")(attributes);
  }
  return made;
}

/// Throws RecursionError if trees are too deep, or contain themselves.
struct Deeper {
  Deeper() {
    if (Py_EnterRecursiveCall(" in the arguments or results of a sharded module") != 0) {
      throw_python_error();
    }
  }
  ~Deeper() {
    Py_LeaveRecursiveCall();
  }
  Deeper(const Deeper&) = delete;
  Deeper& operator=(const Deeper&) = delete;
};

} // namespace

void set_tree_functions(py::object children, py::object rebuild) {
  tree_functions() = new TreeFunctions{std::move(children), std::move(rebuild)};
}

void TensorTree::add(PyObject* root) {
  if (THPVariable_Check(root)) {
    auto given = py::reinterpret_borrow<py::object>(root);
    const auto& tensor = THPVariable_Unpack(root);
    if (cast_ && tensor.is_floating_point() && tensor.scalar_type() != *cast_ &&
        has_own_functions(root)) {
      given = given.attr("to")(*cast_);
      has_casts_ = true;
    }
    tensors_.push_back(THPVariable_Unpack(given.ptr()));
    given_.push_back(std::move(given));
    return;
  }
  const Deeper deeper;
  if (is_plain(root) || visit_builtin(root, [this](PyObject* child) { add(child); })) {
    return;
  }
  const auto node = tree_functions()->children(py::handle(root), in_results_);
  if (!node.is_none()) {
    for (const auto child : node.cast<py::tuple>()[0].cast<py::list>()) {
      add(child.ptr());
    }
  }
}

std::vector<at::Tensor*> TensorTree::pointers() {
  std::vector<at::Tensor*> result;
  result.reserve(tensors_.size());
  for (auto& tensor : tensors_) {
    result.push_back(&tensor);
  }
  return result;
}

bool TensorTree::was_replaced() const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!tensors_[i].is_same(THPVariable_Unpack(given_[i].ptr()))) {
      return true;
    }
  }
  return has_casts_;
}

py::object TensorTree::rebuilt(PyObject* root) {
  const auto same = py::reinterpret_borrow<py::object>(root);
  if (THPVariable_Check(root)) {
    const auto i = next_++;
    const auto& given = given_[i];
    return tensors_[i].is_same(THPVariable_Unpack(given.ptr()))
               ? given
               : alike(wrapped(tensors_[i]), given.ptr());
  }
  if (is_plain(root)) {
    return same;
  }
  const Deeper deeper;
  bool changed = false;
  py::list children;
  const auto rebuild_child = [&](PyObject* child) {
    auto copy = rebuilt(child);
    changed |= copy.ptr() != child;
    children.append(std::move(copy));
  };
  if (visit_builtin(root, rebuild_child)) {
    if (!changed) {
      return same;
    }
    if (PyTuple_CheckExact(root)) {
      return py::tuple(children);
    }
    if (PyList_CheckExact(root)) {
      return children;
    }
    py::dict copy;
    size_t i = 0;
    for (const auto item : py::reinterpret_borrow<py::dict>(root)) {
      copy[item.first] = children[i++];
    }
    return copy;
  }
  const auto node = tree_functions()->children(same, in_results_);
  if (node.is_none()) {
    return same;
  }
  const auto parts = node.cast<py::tuple>();
  for (const auto child : parts[0].cast<py::list>()) {
    rebuild_child(child.ptr());
  }
  return changed ? tree_functions()->rebuild(same, children, py::object(parts[1])) : same;
}

} // namespace fsdp::python
