#include "optim/matrix_plan.h"

#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "layout/mesh_layout.h"

namespace fsdp::detail {

namespace {

using Coordinate = std::vector<int64_t>;

int64_t numel_of(const std::vector<int64_t>& sizes) {
  return Box::whole(sizes).numel();
}

std::vector<int64_t> minus(std::vector<int64_t> first, const std::vector<int64_t>& second) {
  std::transform(first.begin(), first.end(), second.begin(), first.begin(), std::minus<>());
  return first;
}

std::vector<int64_t> plus(std::vector<int64_t> first, const std::vector<int64_t>& second) {
  std::transform(first.begin(), first.end(), second.begin(), first.begin(), std::plus<>());
  return first;
}

/// Plans buckets, one after another.
class BucketPlan {
 public:
  BucketPlan(const std::vector<MatrixParam>& params, const MatrixMesh& mesh)
      : params_(params), mesh_(mesh) {
    for (const auto rank : c10::irange(numel_of(mesh.shape))) {
      coordinates_.push_back(grid_coordinate(mesh.shape, rank));
    }
    load_.resize(coordinates_.size());
  }

  int num_ranks() const {
    return static_cast<int>(coordinates_.size());
  }

  MatrixBucket plan(size_t first, size_t end) {
    MatrixBucket bucket{.rank = mesh_.rank};
    for (auto param = first; param < end; ++param) {
      bucket.params.push_back(param);
      for (auto& matrix : matrices_of(params_[param], param)) {
        if (matrix.box.numel() > 0) {
          bucket.matrices.push_back(std::move(matrix));
        }
      }
    }
    choose_owners(bucket);
    fill_lists(bucket);
    return bucket;
  }

 private:
  /// A part of a matrix that a rank holds.
  struct HeldPart {
    Box in_local;
    Box in_matrix;
  };
  std::vector<HeldPart> parts_of(const Matrix& matrix, int rank) const {
    const auto& param = params_[matrix.param];
    std::vector<HeldPart> parts;
    auto [boxes, is_new] = boxes_.try_emplace({matrix.param, rank});
    if (is_new) {
      boxes->second = local_boxes(param.sizes, param.placements, mesh_.shape, coordinates_[rank]);
    }
    for (const auto& local : boxes->second) {
      if (const auto both = intersection(local.box, matrix.box)) {
        parts.push_back(
            {{plus(minus(both->offsets, local.box.offsets), local.at), both->sizes},
             {minus(both->offsets, matrix.box.offsets), both->sizes}});
      }
    }
    return parts;
  }

  /// Returns the ranks that hold all of the matrix. There are none if it is divided.
  std::vector<int> holders(const Matrix& matrix) const {
    std::vector<int> found;
    for (const auto rank : c10::irange(num_ranks())) {
      const auto parts = parts_of(matrix, rank);
      if (!parts.empty() && parts.front().in_matrix.sizes != matrix.box.sizes) {
        return {};
      }
      if (!parts.empty()) {
        found.push_back(rank);
      }
    }
    return found;
  }

  /// Returns true if both ranks belong to one replica of the parameter.
  bool in_one_replica(const Matrix& matrix, int first, int second) const {
    const auto& placements = params_[matrix.param].placements;
    for (const auto axis : c10::irange(placements.size())) {
      if (std::holds_alternative<Replicate>(placements[axis]) &&
          coordinates_[first][axis] != coordinates_[second][axis]) {
        return false;
      }
    }
    return true;
  }

  /// Gives the matrices, those with the most operations first, to the ranks that have the least to
  /// do: among those that hold all of the matrix if they do not get too much.
  void choose_owners(MatrixBucket& bucket) {
    std::vector<int> everyone(num_ranks());
    std::iota(everyone.begin(), everyone.end(), 0);
    std::vector<Matrix*> sorted;
    auto sum = std::accumulate(load_.begin(), load_.end(), 0.0);
    for (auto& matrix : bucket.matrices) {
      sorted.push_back(&matrix);
      sum += operations(matrix);
    }
    std::stable_sort(sorted.begin(), sorted.end(), [](const Matrix* a, const Matrix* b) {
      return operations(*a) > operations(*b);
    });
    // No division can promise less than the mean and, for one rank, most of another matrix.
    const auto most = sorted.empty() ? 0 : operations(*sorted.front());
    const auto enough = (sum + most * (num_ranks() - 1)) / num_ranks();
    for (auto* matrix : sorted) {
      const auto least_of = [&](const std::vector<int>& ranks) {
        return *std::min_element(
            ranks.begin(), ranks.end(), [&](int a, int b) { return load_[a] < load_[b]; });
      };
      const auto holding = holders(*matrix);
      matrix->owner = least_of(holding.empty() ? everyone : holding);
      if (load_[matrix->owner] + operations(*matrix) > enough) {
        matrix->owner = least_of(everyone);
      }
      load_[matrix->owner] += operations(*matrix);
      bucket.is_local = bucket.is_local && holding == std::vector{matrix->owner};
    }
  }

  void fill_lists(MatrixBucket& bucket) const {
    for (auto* list :
         {&bucket.to_owners, &bucket.from_holders, &bucket.to_holders, &bucket.from_owners}) {
      list->splits.resize(num_ranks());
    }
    for (const auto rank : c10::irange(num_ranks())) {
      for (const auto index : c10::irange(bucket.matrices.size())) {
        const auto& matrix = bucket.matrices[index];
        const auto add = [&](PartList& list, const Box& box) {
          list.parts.push_back({index, box});
          list.splits[rank] += box.numel();
        };
        if (matrix.owner == rank) {
          for (const auto& part : parts_of(matrix, mesh_.rank)) {
            if (in_one_replica(matrix, rank, mesh_.rank)) {
              add(bucket.to_owners, part.in_local);
            }
            add(bucket.from_owners, part.in_local);
          }
        }
        if (matrix.owner == mesh_.rank) {
          for (const auto& part : parts_of(matrix, rank)) {
            if (in_one_replica(matrix, rank, mesh_.rank)) {
              add(bucket.from_holders, part.in_matrix);
            }
            add(bucket.to_holders, part.in_matrix);
          }
        }
      }
    }
  }

  const std::vector<MatrixParam>& params_;
  const MatrixMesh& mesh_;
  std::vector<Coordinate> coordinates_;                                   // of all ranks
  mutable std::map<std::pair<size_t, int>, std::vector<LocalBox>> boxes_; // by parameter and rank
  std::vector<double> load_; // the operations of each rank, of all buckets so far
};

} // namespace

int64_t num_rows(at::IntArrayRef sizes) {
  return sizes[sizes.size() == 3 ? 1 : 0];
}

std::vector<Matrix> matrices_of(const MatrixParam& param, size_t index) {
  const auto& sizes = param.sizes;
  const bool is_stack = sizes.size() == 3;
  const size_t row_dim = is_stack ? 1 : 0;
  const auto rows = num_rows(sizes);
  TORCH_INTERNAL_ASSERT(param.blocks > 0 && rows % param.blocks == 0);
  Matrix matrix{.param = index, .box = Box::whole(sizes)};
  matrix.rows = rows / param.blocks;
  matrix.columns = std::accumulate(
      sizes.begin() + static_cast<std::ptrdiff_t>(row_dim) + 1, sizes.end(), int64_t{1},
      std::multiplies<>());
  matrix.box.sizes[row_dim] = matrix.rows;
  if (is_stack) {
    matrix.box.sizes[0] = 1;
  }
  std::vector<Matrix> matrices;
  for (const auto layer : c10::irange(is_stack ? sizes[0] : 1)) {
    for (const auto block : c10::irange(param.blocks)) {
      if (is_stack) {
        matrix.box.offsets[0] = layer;
      }
      matrix.box.offsets[row_dim] = block * matrix.rows;
      matrices.push_back(matrix);
    }
  }
  return matrices;
}

double operations(const Matrix& matrix) {
  const auto few = static_cast<double>(std::min(matrix.rows, matrix.columns));
  const auto many = static_cast<double>(std::max(matrix.rows, matrix.columns));
  return few * few * (2 * many + few);
}

std::vector<MatrixBucket> plan_matrices(
    const std::vector<MatrixParam>& params, const MatrixMesh& mesh, int64_t most_numel) {
  BucketPlan plan(params, mesh);
  for (const auto i : c10::irange(params.size())) {
    const auto matrices = matrices_of(params[i], i);
    most_numel = std::max(most_numel, matrices.empty() ? 0 : matrices.front().box.numel());
  }
  std::vector<MatrixBucket> buckets;
  for (size_t first = 0; first < params.size();) {
    auto numel = numel_of(params[first].sizes);
    auto end = first + 1;
    for (; end < params.size(); ++end) {
      numel += numel_of(params[end].sizes);
      if (numel / plan.num_ranks() > most_numel) {
        break;
      }
    }
    buckets.push_back(plan.plan(first, end));
    first = end;
  }
  return buckets;
}

} // namespace fsdp::detail
