#include "custom_comm.h"

#include <utility>

#include "process_groups.h"

namespace fsdp::python {

namespace {

/// Waits at once for what Python returned: None, or a Work.
void wait_for(const py::object& work) {
  if (!work.is_none()) {
    work.attr("wait")();
  }
}

py::object operation(const ReduceOp& op) {
  auto kinds = py::module_::import("torch.distributed").attr("ReduceOp");
  switch (op.kind()) {
    case ReduceOp::Avg:
      return kinds.attr("AVG");
    case ReduceOp::PremulSum:
      return py::module_::import("torch.distributed").attr("_make_nccl_premul_sum")(op.factor());
    default:
      return kinds.attr("SUM");
  }
}

/// `Collective` is AllGather or ReduceScatter.
template <class Collective>
class PythonComm : public Collective {
 public:
  explicit PythonComm(py::object comm) : comm_(std::move(comm)) {}

  at::Tensor allocate(at::IntArrayRef sizes, at::TensorOptions options) override {
    const Locked locked;
    return comm_.handle()
        .attr("allocate")(
            sizes.vec(), py::arg("dtype") = c10::typeMetaToScalarType(options.dtype()),
            py::arg("device") = options.device())
        .template cast<at::Tensor>();
  }

 protected:
  /// Needs Python's lock.
  template <class... Args>
  Work call(const at::Tensor& out, const at::Tensor& in, ProcessGroup& group, Args&&... args) {
    wait_for(comm_.handle()(
        py::arg("output_tensor") = out, py::arg("input_tensor") = in,
        py::arg("group") = given_group(group), std::forward<Args>(args)...));
    return {};
  }

 private:
  const Reference comm_;
};

class PythonAllGather : public PythonComm<AllGather> {
 public:
  using PythonComm::PythonComm;

  Work operator()(
      at::Tensor& out, const at::Tensor& in, ProcessGroup& group, bool async_op) override {
    const Locked locked;
    return call(out, in, group, py::arg("async_op") = async_op);
  }
};

class PythonReduceScatter : public PythonComm<ReduceScatter> {
 public:
  using PythonComm::PythonComm;

  Work operator()(
      at::Tensor& out,
      const at::Tensor& in,
      ProcessGroup& group,
      ReduceOp op,
      bool async_op) override {
    const Locked locked;
    return call(out, in, group, py::arg("op") = operation(op), py::arg("async_op") = async_op);
  }
};

} // namespace

std::shared_ptr<AllGather> python_all_gather(py::object comm) {
  return std::make_shared<PythonAllGather>(std::move(comm));
}

std::shared_ptr<ReduceScatter> python_reduce_scatter(py::object comm) {
  return std::make_shared<PythonReduceScatter>(std::move(comm));
}

std::function<void(at::Tensor&)> python_all_reduce_hook(py::object hook) {
  if (hook.is_none()) {
    return {};
  }
  return [hook = Reference(std::move(hook))](at::Tensor& flat) {
    const Locked locked;
    hook.handle()(flat);
  };
}

ReducedGradsHook python_reduced_grads_hook(py::object hook) {
  if (hook.is_none()) {
    return {};
  }
  return [hook = Reference(std::move(hook))](ReducedGrads grads) {
    const Locked locked;
    hook.handle()(std::move(grads));
  };
}

} // namespace fsdp::python
