#include <fsdp/reduce_op.h>

#include <c10/util/Exception.h>

namespace fsdp {

ReduceOp::ReduceOp(Kind kind) : kind_(kind) {
  TORCH_CHECK_VALUE(kind != PremulSum, "use ReduceOp::premul_sum(factor)");
}

ReduceOp ReduceOp::premul_sum(double factor) {
  return {PremulSum, factor};
}

std::string ReduceOp::str() const {
  switch (kind_) {
    case Sum:
      return "sum";
    case Avg:
      return "avg";
    case Max:
      return "max";
    case Min:
      return "min";
    case Product:
      return "product";
    case PremulSum:
      return c10::str("premul_sum by ", factor_);
  }
  return "?";
}

} // namespace fsdp
