#pragma once

#include <ATen/core/Tensor.h>
#include <fsdp/muon.h>
#include <fsdp/process_group.h>

#include <optional>
#include <vector>

#include "optim/matrix_plan.h"
#include "optim/matrix_update.h"

namespace fsdp::detail {

/// Returns nearly orthogonal matrices for a batch of matrices [count, rows, columns], as
/// torch.optim.Muon does for one matrix.
at::Tensor newton_schulz(at::Tensor matrices, const optim::MuonOptions& options);

/// Muon's steps for matrices. See Note [Matrices over many ranks].
class MatrixSteps {
 public:
  /// Makes a step ready. `updates` are all parameters of the optimizer that have matrices, also
  /// those without a gradient. Throws ValueError if one of them or its options has an invalid
  /// value, and on all ranks if the ranks bring different ones. Collective over the ranks that
  /// share the parameters.
  void prepare(const std::vector<MatrixUpdate>& updates);
  /// Makes the step. Collective in the same way.
  void run(const std::vector<MatrixUpdate>& updates);

  void set_exchange_numel(int64_t numel);

 private:
  /// The properties of a parameter that decide its plan.
  struct Layout {
    at::Device param_device;
    at::Device device; // where the matrices are computed
    at::ScalarType ns_dtype = at::kFloat;
    bool has_grad = false;
    std::optional<DeviceMesh> mesh = {};
    MatrixParam param = {};
    bool operator==(const Layout&) const = default;
  };
  /// Parameters on one mesh whose matrices have one dtype on their way.
  struct Bucket {
    MatrixBucket plan;  // in which parameters are indices of updates
    ProcessGroup group; // undefined if the parameters are on no mesh
    at::Device device;  // where the matrices are computed
    at::ScalarType dtype = at::kFloat;
  };
  class Flight;

  static Layout layout_of(const MatrixUpdate& update);
  void make_plan(const std::vector<Layout>& layouts);

  int64_t exchange_numel_ = optim::Muon::kExchangeNumel;
  std::optional<std::vector<Layout>> layouts_; // for which the plan was made
  std::vector<Bucket> buckets_;
};

} // namespace fsdp::detail
