#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include <fsdp/placement.h>

#include "layout/box.h"

namespace fsdp::detail {

// Note [Matrices over many ranks]
//
// Muon needs all of a matrix to compute any part of its update. So every matrix has an owner, one
// of the ranks that share it:
//
//   1. Every rank computes its parts of the momentum, and sends each owner its parts of that
//      owner's matrices: one all-to-all.
//   2. Every owner computes the updates of its matrices, those of one shape together.
//   3. Every owner sends each rank its parts of these updates: another all-to-all.
//
// Replicas hold the same parts. An owner receives parts from its own replica only, but sends
// updates to all replicas. So each replica computes only some of the matrices.
//
// Matrices are exchanged in buckets: the exchange of the next bucket is under way while this one is
// computed. Owners are chosen so that all ranks have about the same number of operations to do,
// counted over this bucket and those before it. A matrix that lies on one rank as a whole, as an
// expert may, stays there unless that rank has too much to do.
//
// This file is the integer arithmetic: no tensors, no communication. Every rank computes the same
// owners by itself.

/// A parameter as Muon sees it.
struct MatrixParam {
  std::vector<int64_t> sizes; // of the whole parameter
  std::vector<Placement> placements;
  int64_t blocks = 1; // the number of matrices, one below the other, in each matrix
  bool operator==(const MatrixParam&) const = default;
};

struct Matrix {
  size_t param = 0;
  Box box; // in the whole parameter
  int64_t rows = 0;
  int64_t columns = 0;
  int owner = 0; // as an index into the ranks of the mesh
};

/// A rectangular part of a matrix that goes to another rank or comes from one.
struct MatrixPart {
  size_t matrix = 0; // of the bucket
  Box box;           // in this rank's part of the parameter, or in the matrix
};

/// The parts of one side of an all-to-all, rank after rank.
struct PartList {
  std::vector<MatrixPart> parts;
  std::vector<int64_t> splits; // how many elements there are for each rank
};

/// The parts that this rank exchanges for some parameters.
struct MatrixBucket {
  std::vector<size_t> params;
  std::vector<Matrix> matrices;
  PartList to_owners;    // boxes in this rank's part of the parameter
  PartList from_holders; // boxes in the matrices that this rank owns
  PartList to_holders;   // the same
  PartList from_owners;  // boxes in this rank's part of the parameter
  bool is_local = true;  // no rank needs anything from another one
  int rank = 0;          // this rank, as an index into the ranks of the mesh

  bool is_mine(const Matrix& matrix) const {
    return matrix.owner == rank;
  }
};

/// The mesh that all parameters of a plan are on.
struct MatrixMesh {
  std::vector<int64_t> shape;
  int rank = 0; // this rank, as an index into the ranks of the mesh
};

/// Returns the rows of each matrix of a parameter, before it is divided into blocks.
int64_t num_rows(at::IntArrayRef sizes);

/// Returns the matrices of a parameter. `blocks` must divide their rows.
std::vector<Matrix> matrices_of(const MatrixParam& param, size_t index);

/// Returns the operations of an iteration of Newton-Schulz, up to a factor.
double operations(const Matrix& matrix);

/// Divides the parameters, in their order, into buckets. The ranks of a bucket have `most_numel`
/// elements each on average, or fewer. But a bucket has room for a matrix per rank, so that every
/// rank has something to do.
std::vector<MatrixBucket> plan_matrices(
    const std::vector<MatrixParam>& params, const MatrixMesh& mesh, int64_t most_numel);

} // namespace fsdp::detail
