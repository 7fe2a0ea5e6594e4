#include "optim/matrix_steps.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace fsdp::detail {

using optim::MuonOptions;

namespace {

at::Tensor part_of(at::Tensor tensor, const Box& box) {
  for (const auto dim : c10::irange(tensor.dim())) {
    tensor = tensor.narrow(dim, box.offsets[dim], box.sizes[dim]);
  }
  return tensor;
}

int64_t numel_of(const PartList& list) {
  return std::accumulate(list.splits.begin(), list.splits.end(), int64_t{0});
}

/// Returns views of a buffer that holds the parts of a list, one after another.
std::vector<at::Tensor> views_of(const at::Tensor& buffer, const PartList& list) {
  std::vector<at::Tensor> views;
  int64_t offset = 0;
  for (const auto& part : list.parts) {
    const auto numel = part.box.numel();
    views.push_back(buffer.narrow(0, offset, numel).view(part.box.sizes));
    offset += numel;
  }
  return views;
}

void copy_all(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
}

double adjusted_lr(const MuonOptions& options, const Matrix& matrix) {
  const auto rows = static_cast<double>(matrix.rows);
  const auto columns = static_cast<double>(matrix.columns);
  return options.lr() * (options.match_rms_adamw() ? 0.2 * std::sqrt(std::max(rows, columns))
                                                   : std::sqrt(std::max(1.0, rows / columns)));
}

} // namespace

at::Tensor newton_schulz(at::Tensor matrices, const MuonOptions& options) {
  const bool is_tall = matrices.size(1) > matrices.size(2);
  if (is_tall) {
    matrices = matrices.mT();
  }
  const auto norms = at::linalg_vector_norm(matrices, 2, {{1, 2}}, /*keepdim=*/true);
  matrices = matrices / norms.clamp_min(options.eps());
  const auto [a, b, c] = options.ns_coefficients();
  for (int64_t i = 0; i < options.ns_steps(); ++i) {
    const auto gram = matrices.bmm(matrices.mT());
    matrices = at::baddbmm(matrices, at::baddbmm(gram, gram, gram, b, c), matrices, a, 1);
  }
  return is_tall ? matrices.mT() : matrices;
}

// ------------------------------------------------------------ The plan

MatrixSteps::Layout MatrixSteps::layout_of(const MatrixUpdate& update) {
  Layout layout{
      .param_device = update.param.device(),
      .device = update.device(),
      .ns_dtype = update.options->ns_dtype(),
      .has_grad = update.grad.defined(),
      .param = {.blocks = update.options->blocks()}};
  layout.param.sizes = update.sizes();
  if (update.spec) {
    layout.param.placements = update.spec->placements;
    layout.mesh = update.spec->mesh;
  }
  return layout;
}

void MatrixSteps::make_plan(const std::vector<Layout>& layouts) {
  // Parameters on one mesh, of one device and dtype, are planned together.
  std::vector<std::vector<size_t>> families;
  for (const auto i : c10::irange(layouts.size())) {
    if (!layouts[i].has_grad) {
      continue;
    }
    const auto fits = [&](const std::vector<size_t>& family) {
      const auto& first = layouts[family.front()];
      return first.mesh == layouts[i].mesh && first.param_device == layouts[i].param_device &&
             first.ns_dtype == layouts[i].ns_dtype;
    };
    const auto found = std::find_if(families.begin(), families.end(), fits);
    (found == families.end() ? families.emplace_back() : *found).push_back(i);
  }
  buckets_.clear();
  for (const auto& family : families) {
    const auto& first = layouts[family.front()];
    const auto group = first.mesh ? first.mesh->whole_group() : ProcessGroup();
    const auto mesh = first.mesh ? MatrixMesh{first.mesh->shape(), group.rank()} : MatrixMesh{};
    std::vector<MatrixParam> params;
    for (const auto i : family) {
      params.push_back(layouts[i].param);
    }
    for (auto& plan : plan_matrices(params, mesh, exchange_numel_)) {
      for (auto& param : plan.params) {
        param = family[param];
      }
      for (auto& matrix : plan.matrices) {
        matrix.param = family[matrix.param];
      }
      buckets_.push_back({std::move(plan), group, first.device, first.ns_dtype});
    }
  }
}

void MatrixSteps::prepare(const std::vector<MatrixUpdate>& updates) {
  std::vector<Layout> layouts;
  layouts.reserve(updates.size());
  for (const auto& update : updates) {
    check(update);
    layouts.push_back(layout_of(update));
  }
  const bool is_new = !layouts_ || layouts != *layouts_;
  compare_ranks(updates, exchange_numel_, is_new);
  if (is_new) {
    make_plan(layouts);
    layouts_ = std::move(layouts);
  }
}

// ------------------------------------------------------------ A step

/// A bucket on its way.
class MatrixSteps::Flight {
 public:
  Flight(const Bucket& bucket, const std::vector<MatrixUpdate>& updates)
      : bucket_(bucket), plan_(bucket.plan), updates_(updates) {}

  /// Updates the momentum and sends the direction of every parameter to the owners.
  void send_directions() {
    std::map<size_t, at::Tensor> directions;
    for (const auto& [options, indices] : by_options()) {
      std::vector<at::Tensor> grads;
      std::vector<at::Tensor> momentum;
      for (const auto i : indices) {
        grads.push_back(updates_[i].grad);
        momentum.push_back(updates_[i].momentum);
      }
      at::_foreach_lerp_(momentum, grads, 1 - options->momentum());
      if (options->nesterov()) {
        momentum = at::_foreach_lerp(grads, momentum, options->momentum());
      }
      for (const auto i : c10::irange(indices.size())) {
        directions[indices[i]] = momentum[i];
      }
    }
    std::vector<at::Tensor> parts;
    for (const auto& part : plan_.to_owners.parts) {
      parts.push_back(part_of(directions.at(param_of(part)), part.box));
    }
    const auto device = updates_[plan_.params.front()].param.device();
    send(parts, plan_.to_owners, plan_.from_holders, device);
  }

  /// Computes the updates of the matrices that this rank owns and sends them to all that hold them.
  void send_results() {
    auto matrices = gather_matrices();
    std::map<size_t, at::Tensor> results;
    for (auto& [key, batch] : matrices) {
      const auto orthogonal = newton_schulz(std::move(batch.matrices), *std::get<0>(key));
      for (const auto i : c10::irange(batch.indices.size())) {
        const auto index = batch.indices[i];
        results[index] =
            orthogonal[static_cast<int64_t>(i)].reshape(plan_.matrices[index].box.sizes);
      }
    }
    std::vector<at::Tensor> parts;
    for (const auto& part : plan_.to_holders.parts) {
      parts.push_back(part_of(results.at(part.matrix), part.box));
    }
    send(parts, plan_.to_holders, plan_.from_owners, bucket_.device);
  }

  /// Decays the weights and subtracts the results.
  void apply_results() {
    const auto& first = updates_[plan_.params.front()].param;
    const auto received = receive().to(first.device());
    for (const auto& [options, indices] : by_options()) {
      std::vector<at::Tensor> params;
      for (const auto i : indices) {
        params.push_back(updates_[i].param);
      }
      at::_foreach_mul_(params, 1 - options->lr() * options->weight_decay());
    }
    std::map<double, std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>> by_lr;
    const auto views = views_of(received, plan_.from_owners);
    for (const auto i : c10::irange(views.size())) {
      const auto& part = plan_.from_owners.parts[i];
      const auto& update = updates_[param_of(part)];
      auto& [params, results] = by_lr[adjusted_lr(*update.options, plan_.matrices[part.matrix])];
      params.push_back(part_of(update.param, part.box));
      results.push_back(views[i]);
    }
    for (const auto& [lr, lists] : by_lr) {
      at::_foreach_add_(lists.first, lists.second, -lr);
    }
  }

 private:
  /// Matrices that are computed together.
  struct Batch {
    std::vector<size_t> indices;
    at::Tensor matrices;
  };
  using BatchKey = std::tuple<const MuonOptions*, int64_t, int64_t>;

  size_t param_of(const MatrixPart& part) const {
    return plan_.matrices[part.matrix].param;
  }

  std::map<const MuonOptions*, std::vector<size_t>> by_options() const {
    std::map<const MuonOptions*, std::vector<size_t>> result;
    for (const auto i : plan_.params) {
      result[updates_[i].options].push_back(i);
    }
    return result;
  }

  void send(
      const std::vector<at::Tensor>& parts,
      const PartList& to,
      const PartList& from,
      at::Device device) {
    auto buffer = at::empty({numel_of(to)}, at::TensorOptions(device).dtype(bucket_.dtype));
    copy_all(views_of(buffer, to), parts);
    sent_ = buffer.to(bucket_.device);
    if (plan_.is_local) {
      received_ = sent_;
      return;
    }
    received_ = at::empty({numel_of(from)}, sent_.options());
    work_ = bucket_.group.all_to_all_async(received_, sent_, from.splits, to.splits);
  }

  at::Tensor receive() {
    work_.wait();
    work_ = {};
    sent_.reset();
    return std::move(received_);
  }

  std::map<BatchKey, Batch> gather_matrices() {
    const auto received = receive();
    std::map<BatchKey, Batch> batches;
    std::map<size_t, at::Tensor> targets;
    for (const auto index : c10::irange(plan_.matrices.size())) {
      const auto& matrix = plan_.matrices[index];
      if (plan_.is_mine(matrix)) {
        batches[{updates_[matrix.param].options, matrix.rows, matrix.columns}].indices.push_back(
            index);
      }
    }
    for (auto& [key, batch] : batches) {
      const auto [options, rows, columns] = key;
      const auto count = static_cast<int64_t>(batch.indices.size());
      batch.matrices = at::empty({count, rows, columns}, received.options());
      for (int64_t i = 0; i < count; ++i) {
        const auto index = batch.indices[i];
        targets[index] = batch.matrices[i].view(plan_.matrices[index].box.sizes);
      }
    }
    std::vector<at::Tensor> to;
    for (const auto& part : plan_.from_holders.parts) {
      to.push_back(part_of(targets.at(part.matrix), part.box));
    }
    copy_all(to, views_of(received, plan_.from_holders));
    return batches;
  }

  const Bucket& bucket_;
  const MatrixBucket& plan_;
  const std::vector<MatrixUpdate>& updates_;
  at::Tensor sent_; // lives until the exchange is over
  at::Tensor received_;
  Work work_;
};

void MatrixSteps::run(const std::vector<MatrixUpdate>& updates) {
  // The directions of the next bucket and the results of the one before are on their way while
  // this bucket is computed.
  std::vector<Flight> flights;
  for (const auto& bucket : buckets_) {
    flights.emplace_back(bucket, updates);
  }
  for (const auto i : c10::irange(flights.size() + 1)) {
    if (i == 0 && !flights.empty()) {
      flights[0].send_directions();
    }
    if (i + 1 < flights.size()) {
      flights[i + 1].send_directions();
    }
    if (i < flights.size()) {
      flights[i].send_results();
    }
    if (i > 0) {
      flights[i - 1].apply_results();
    }
  }
}

void MatrixSteps::set_exchange_numel(int64_t numel) {
  TORCH_CHECK_VALUE(numel > 0, "[Muon] set_exchange_numel: ", numel, " is not above 0");
  exchange_numel_ = numel;
  layouts_.reset(); // so that the next step makes a new plan
}

} // namespace fsdp::detail
