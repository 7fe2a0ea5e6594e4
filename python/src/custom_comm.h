#pragma once

#include <fsdp/comm.h>
#include <fsdp/param.h>

#include <functional>
#include <memory>

#include "interpreter.h"

namespace fsdp::python {

/// Collectives that are written in Python; see torch.distributed.fsdp's AllGather and
/// ReduceScatter.
std::shared_ptr<AllGather> python_all_gather(py::object comm);
std::shared_ptr<ReduceScatter> python_reduce_scatter(py::object comm);
std::function<void(at::Tensor&)> python_all_reduce_hook(py::object hook);
ReducedGradsHook python_reduced_grads_hook(py::object hook);

} // namespace fsdp::python
