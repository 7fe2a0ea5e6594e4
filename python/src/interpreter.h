#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>

namespace fsdp::python {

namespace py = pybind11;

/// Holds Python's global lock. May be nested.
struct Locked {
  Locked() : state(PyGILState_Ensure()) {}
  ~Locked() {
    PyGILState_Release(state);
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

  const PyGILState_STATE state;
};

/// Lets other threads run Python, if the calling thread holds the lock.
class Unlocked {
 public:
  Unlocked() {
    if (PyGILState_Check()) {
      released_.emplace();
    }
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

/// Throws the error that a function of Python has just set.
[[noreturn]] inline void throw_python_error() {
  python_error error;
  error.persist();
  throw error; // NOLINT(misc-throw-by-value-catch-by-reference): persist() comes first
}

/// Takes over a new reference. Throws if a function of Python failed.
inline py::object checked(PyObject* object) {
  if (!object) {
    throw_python_error();
  }
  return py::reinterpret_steal<py::object>(object);
}

inline py::object wrapped(const at::Tensor& tensor) {
  return checked(THPVariable_Wrap(tensor));
}

/// A Python object that may be dropped by any thread, and after the interpreter has ended.
class Reference {
 public:
  explicit Reference(py::object object)
      : object_(object.release().ptr(), [](PyObject* dropped) {
          if (Py_IsInitialized()) {
            const Locked locked;
            Py_DECREF(dropped);
          }
        }) {}

  PyObject* ptr() const {
    return object_.get();
  }
  py::handle handle() const {
    return object_.get();
  }

 private:
  std::shared_ptr<PyObject> object_;
};

} // namespace fsdp::python
