#include "custom_comm.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "process_groups.h"

namespace fsdp::python {

namespace {

at::Tensor allocate_by(
    const Reference& comm, at::IntArrayRef sizes, const at::TensorOptions& options) {
  const Locked locked;
  return comm.handle()
      .attr("allocate")(
          sizes.vec(), py::arg("dtype") = c10::typeMetaToScalarType(options.dtype()),
          py::arg("device") = options.device())
      .cast<at::Tensor>();
}

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

class PythonAllGather : public AllGather {
 public:
  explicit PythonAllGather(py::object comm) : comm_(std::move(comm)) {}

  at::Tensor allocate(at::IntArrayRef sizes, at::TensorOptions options) override {
    return allocate_by(comm_, sizes, options);
  }
  Work operator()(
      at::Tensor& out, const at::Tensor& in, ProcessGroup& group, bool async_op) override {
    const Locked locked;
    wait_for(comm_.handle()(
        py::arg("output_tensor") = out, py::arg("input_tensor") = in,
        py::arg("group") = given_group(group), py::arg("async_op") = async_op));
    return {};
  }

 private:
  const Reference comm_;
};

class PythonReduceScatter : public ReduceScatter {
 public:
  explicit PythonReduceScatter(py::object comm) : comm_(std::move(comm)) {}

  at::Tensor allocate(at::IntArrayRef sizes, at::TensorOptions options) override {
    return allocate_by(comm_, sizes, options);
  }
  Work operator()(
      at::Tensor& out,
      const at::Tensor& in,
      ProcessGroup& group,
      ReduceOp op,
      bool async_op) override {
    const Locked locked;
    wait_for(comm_.handle()(
        py::arg("output_tensor") = out, py::arg("input_tensor") = in,
        py::arg("group") = given_group(group), py::arg("op") = operation(op),
        py::arg("async_op") = async_op));
    return {};
  }

 private:
  const Reference comm_;
};

} // namespace

std::shared_ptr<AllGather> python_all_gather(py::object comm) {
  return std::make_shared<PythonAllGather>(std::move(comm));
}

std::shared_ptr<ReduceScatter> python_reduce_scatter(py::object comm) {
  return std::make_shared<PythonReduceScatter>(std::move(comm));
}

std::function<void(at::Tensor&)> python_all_reduce_hook(py::object hook) {
  return [hook = Reference(std::move(hook))](at::Tensor& flat) {
    const Locked locked;
    hook.handle()(flat);
  };
}

} // namespace fsdp::python
