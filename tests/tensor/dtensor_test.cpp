#include <fsdp/dtensor.h>

#include <torch/torch.h>

#include <fsdp/distributed.h>

#include "layout/box.h"
#include "layout/shard_layout.h"
#include "support/tensors.h"

namespace fsdp {
namespace {

using test::contains;
using test::message_of;
using Placements = std::vector<Placement>;

torch::Tensor sample(const std::vector<int64_t>& sizes) {
  int64_t numel = 1;
  for (const auto size : sizes) {
    numel *= size;
  }
  return torch::arange(numel).view(sizes).to(torch::kDouble);
}

/// This rank's part of `full`, picked element by element.
torch::Tensor expected_local(const torch::Tensor& full, const DTensor& spread) {
  auto local = full;
  for (int64_t dim = 0; dim < full.dim(); ++dim) {
    const auto runs = detail::local_runs(
        full.size(dim), detail::shard_steps(spread.placements(), spread.device_mesh().shape(), dim),
        spread.device_mesh().get_coordinate());
    std::vector<torch::Tensor> pieces{local.narrow(dim, 0, 0)};
    for (const auto& run : runs) {
      pieces.push_back(local.narrow(dim, run.offset, run.length));
    }
    local = torch::cat(pieces, dim);
  }
  const auto& mesh = spread.device_mesh();
  for (size_t axis = 0; axis < spread.placements().size(); ++axis) {
    if (const auto* blocks = std::get_if<BlockShard>(&spread.placements()[axis])) {
      const auto last = blocks->dims - 1;
      auto sizes = local.sizes().vec();
      for (int64_t dim = 0; dim < last; ++dim) {
        sizes[last] *= sizes[dim];
        sizes[dim] = 1;
      }
      const auto chunks = local.reshape(sizes).chunk(mesh.shape()[axis], last);
      const auto index = static_cast<size_t>(mesh.get_coordinate()[axis]);
      local = index < chunks.size() ? chunks[index] : chunks[0].narrow(last, 0, 0);
    }
  }
  return local;
}

void expect_boxes(const DTensor& spread, const torch::Tensor& full) {
  const auto& mesh = spread.device_mesh();
  int64_t numel = 0;
  for (const auto& [box, at] : detail::local_boxes(
           spread.sizes().vec(), spread.placements(), mesh.shape(), mesh.get_coordinate())) {
    auto mine = spread.to_local();
    auto whole = full;
    for (int64_t dim = 0; dim < full.dim(); ++dim) {
      const auto i = static_cast<size_t>(dim);
      mine = mine.narrow(dim, at[i], box.sizes[i]);
      whole = whole.narrow(dim, box.offsets[i], box.sizes[i]);
    }
    EXPECT_TRUE(torch::equal(mine, whole));
    numel += box.numel();
  }
  EXPECT_EQ(numel, spread.to_local().numel());
}

void expect_holds(const DTensor& spread, const torch::Tensor& full) {
  const auto& placements = spread.placements();
  SCOPED_TRACE(to_string(placements));
  const bool partial = std::any_of(placements.begin(), placements.end(), [](const auto& p) {
    return std::holds_alternative<Partial>(p);
  });
  if (!partial) {
    EXPECT_SAME(spread.to_local(), expected_local(full, spread));
    expect_boxes(spread, full);
  }
  EXPECT_TRUE(spread.to_local().is_contiguous());
  EXPECT_EQ(spread.sizes(), full.sizes());
  EXPECT_SAME(spread.full_tensor(), full);
}

const std::vector<Placement>& choices() {
  static const std::vector<Placement> all{Replicate{},        Shard{0},           Shard{1},
                                          StridedShard{0, 2}, StridedShard{1, 3}, Partial{},
                                          BlockShard{2}};
  return all;
}

bool is_valid(const Placements& placements) {
  return std::count_if(placements.begin(), placements.end(), [](const auto& placement) {
           return std::holds_alternative<BlockShard>(placement);
         }) <= 1;
}

class OneAxis : public testing::TestWithParam<int> {};

TEST_P(OneAxis, RedistributesFromEverythingToEverything) {
  const int n = GetParam();
  run_ranks(n, [&](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {n}, {"dp"});
    for (const auto& sizes : {std::vector<int64_t>{8, 8}, {5, 7}, {1, 3}, {0, 2}}) {
      const auto full = sample(sizes);
      for (const auto& from : choices()) {
        SCOPED_TRACE(c10::str(sizes, " from ", to_string(from)));
        const auto spread = distribute_tensor(full, mesh, {from});
        expect_holds(spread, full);
        for (const auto& to : choices()) {
          expect_holds(spread.redistribute({to}), full);
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    WorldSizes, OneAxis, testing::Values(1, 2, 3, 4, 8), testing::PrintToStringParamName());

TEST(TwoAxes, RedistributeFromEverythingToEverything) {
  run_ranks(6, [](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {3, 2}, {"dp", "tp"});
    const auto full = sample({7, 5});
    for (const auto& a : choices()) {
      for (const auto& b : choices()) {
        if (!is_valid({a, b})) {
          continue;
        }
        SCOPED_TRACE("from " + to_string(Placements{a, b}));
        const auto spread = distribute_tensor(full, mesh, {a, b});
        expect_holds(spread, full);
        for (const auto& c : choices()) {
          for (const auto& d : choices()) {
            if (is_valid({c, d})) {
              expect_holds(spread.redistribute({c, d}), full);
            }
          }
        }
      }
    }
  });
}

TEST(FourAxes, RoundTrip) {
  run_ranks(16, [](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2, 2, 2}, {"pp", "dp", "cp", "tp"});
    const auto full = sample({9, 6, 5});
    const auto spread =
        distribute_tensor(full, mesh, {Replicate{}, StridedShard{0, 4}, Shard{0}, Shard{0}});
    expect_holds(spread, full);
    expect_holds(spread.redistribute({Shard{2}, Shard{1}, Partial{}, Shard{0}}), full);
    expect_holds(spread.redistribute({Shard{0}, Shard{0}, Shard{0}, Shard{0}}), full);
  });
}

// As the weights of experts: rows of each on several ranks, or ranks with parts of two of them.
TEST(BlockShard, DividesTheRowsOfSeveralDims) {
  for (const int n : {1, 2, 3, 4, 7, 8}) {
    run_ranks(n, [&](int rank) {
      const auto mesh = init_device_mesh(torch::kCPU, {n}, {"dp"});
      for (const auto& sizes : {std::vector<int64_t>{2, 4, 3}, {3, 5, 2}, {8, 1, 2}, {2, 0, 3}}) {
        SCOPED_TRACE_OF(n, sizes);
        const auto full = sample(sizes);
        for (const int64_t dims : {2, 3}) {
          const auto spread = distribute_tensor(full, mesh, {BlockShard{dims}});
          expect_holds(spread, full);
          expect_holds(spread.redistribute({Shard{1}}), full);
          expect_holds(spread.redistribute({Shard{2}}).redistribute({BlockShard{dims}}), full);
        }
      }
      const auto spread = distribute_tensor(sample({2, 4, 3}), mesh, {BlockShard{2}});
      if (n == 4) {
        EXPECT_SAME(
            spread.to_local(),
            sample({2, 4, 3}).select(0, rank / 2).narrow(0, rank % 2 * 2, 2).unsqueeze(0));
      }
    });
  }
  run_ranks(6, [](int) { // after the other axis, whichever comes first
    const auto mesh = init_device_mesh(torch::kCPU, {3, 2}, {"dp", "ep"});
    const auto full = sample({4, 5, 3});
    for (const auto& other : choices()) {
      for (const auto& placements :
           {Placements{other, BlockShard{2}}, Placements{BlockShard{2}, other}}) {
        if (is_valid(placements)) {
          SCOPED_TRACE(to_string(placements));
          const auto spread = distribute_tensor(full, mesh, placements);
          expect_holds(spread, full);
          expect_holds(spread.redistribute({Shard{2}, Shard{0}}), full);
        }
      }
    }
  });
}

TEST(BlockShard, RefusesWhatDoesNotFit) {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 1}, {"dp", "ep"});
    const auto refused = [&](const Placements& placements, const std::string& part) {
      const auto message = message_of<c10::ValueError>(
          [&] { distribute_tensor(torch::zeros({2, 2}), mesh, placements); });
      EXPECT_TRUE(contains(message, part));
    };
    refused({BlockShard{3}, Replicate{}}, "B(3) does not fit a tensor of 2 dims");
    refused({BlockShard{1}, Replicate{}}, "B(1) does not fit a tensor of 2 dims; it merges two or");
    refused({BlockShard{-1}, Replicate{}}, "B(-1) does not fit a tensor of 2 dims");
    refused({BlockShard{2}, BlockShard{2}}, "only one axis can have a BlockShard");
    const auto message = message_of<c10::ValueError>(
        [&] { DTensor::from_local(torch::zeros({1, 2}), mesh["dp"], {BlockShard{2}}); });
    EXPECT_TRUE(contains(message, "(B(2)): say the sizes of the whole tensor, too"));
  });
}

TEST(DTensor, ManyRanksWithEmptyShards) {
  run_ranks(128, [](int rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {128}, {"dp"});
    const auto full = sample({100, 3});
    const auto spread = distribute_tensor(full, mesh, {Shard{0}});
    EXPECT_EQ(spread.to_local().size(0), rank < 100 ? 1 : 0);
    expect_holds(spread, full);
  });
}

TEST(DTensor, DistributeTakesTheFirstRanksValues) {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    const auto mine = sample({4, 3}) + 100 * rank;
    const auto before = mine.clone();
    expect_holds(distribute_tensor(mine, mesh, {Shard{0}, Replicate{}}), sample({4, 3}));
    expect_holds(distribute_tensor(mine, mesh, {Replicate{}, Shard{1}}), sample({4, 3}));
    EXPECT_SAME(mine, before);
  });
}

TEST(DTensor, PartialReducesByItsOp) {
  run_ranks(3, [](int rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {3}, {"dp"});
    const auto local = torch::full({4, 2}, rank + 1.0);
    const auto reduced = [&](ReduceOp op, Placement to) {
      return DTensor::from_local(local, mesh, {Partial{op}}).redistribute({to}).full_tensor();
    };
    for (const auto& to : Placements{Replicate{}, Shard{0}, Shard{1}}) {
      SCOPED_TRACE(to_string(to));
      EXPECT_SAME(reduced(ReduceOp::Sum, to), torch::full({4, 2}, 6.0));
      EXPECT_SAME(reduced(ReduceOp::Avg, to), torch::full({4, 2}, 2.0));
      EXPECT_SAME(reduced(ReduceOp::Max, to), torch::full({4, 2}, 3.0));
      EXPECT_SAME(reduced(ReduceOp::Min, to), torch::full({4, 2}, 1.0));
      EXPECT_SAME(reduced(ReduceOp::Product, to), torch::full({4, 2}, 6.0));
    }
    EXPECT_SAME(local, torch::full({4, 2}, rank + 1.0)); // stays as it is
    const auto whole = DTensor::from_local(torch::full({2}, 5.0), mesh, {Replicate{}});
    for (const auto op :
         {ReduceOp(ReduceOp::Sum), ReduceOp(ReduceOp::Avg), ReduceOp(ReduceOp::Max),
          ReduceOp(ReduceOp::Min), ReduceOp(ReduceOp::Product), ReduceOp::premul_sum(0.5)}) {
      SCOPED_TRACE(op.str());
      EXPECT_SAME(whole.redistribute({Partial{op}}).full_tensor(), torch::full({2}, 5.0));
    }
  });
}

TEST(DTensor, FromLocalTakesEvenPartsOrChecksSizes) {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2}, {"dp"});
    const auto even = DTensor::from_local(torch::full({2, 3}, rank + 0.0), mesh, {Shard{0}});
    EXPECT_EQ(even.sizes(), (std::vector<int64_t>{4, 3}));
    EXPECT_EQ(even.numel(), 12);
    const auto local = sample({5}).narrow(0, rank * 3, rank == 0 ? 3 : 2);
    const auto uneven = DTensor::from_local(local, mesh, {Shard{-1}}, std::vector<int64_t>{5});
    EXPECT_SAME(uneven.full_tensor(), sample({5}));
    EXPECT_TRUE(uneven.to_local().is_same(local));
    const auto message = message_of<c10::ValueError>(
        [&] { DTensor::from_local(torch::zeros({2}), mesh, {Shard{0}}, std::vector<int64_t>{6}); });
    EXPECT_TRUE(contains(message, "holds [3], but the local tensor is [2]"));
    EXPECT_THROW(
        DTensor::from_local(torch::zeros({2}), mesh, {Shard{0}}, std::vector<int64_t>{4, 1}),
        c10::ValueError);
    EXPECT_THROW(DTensor::from_local(torch::Tensor(), mesh, {Shard{0}}), c10::ValueError);
    EXPECT_THROW(distribute_tensor(torch::zeros({2}), mesh, {Shard{1}}), c10::ValueError);
    EXPECT_THROW(even.redistribute({Shard{0}, Shard{1}}), c10::ValueError);
  });
}

TEST(DTensor, KeepsDtypesAndIgnoresAutograd) {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {2}, {"dp"});
    for (const auto type : {torch::kBFloat16, torch::kInt64, torch::kBool, torch::kFloat8_e4m3fn}) {
      SCOPED_TRACE_OF(type);
      const auto full = sample({5}).to(type);
      EXPECT_SAME(distribute_tensor(full, mesh, {Shard{0}}).full_tensor(), full);
    }
    const auto leaf = torch::ones({4}, torch::requires_grad());
    EXPECT_FALSE(distribute_tensor(leaf, mesh, {Shard{0}}).full_tensor().requires_grad());
  });
}

TEST(DTensor, SharesTheLocalTensorWhereNothingChanges) {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {2}, {"dp"});
    const auto spread = distribute_tensor(sample({4}), mesh, {Shard{0}});
    EXPECT_TRUE(spread.redistribute({Shard{-1}}).to_local().is_same(spread.to_local()));
    // A shard cut from a replica does not keep the replica's memory.
    const auto replica = distribute_tensor(sample({4}), mesh, {Replicate{}});
    EXPECT_EQ(replica.redistribute({Shard{0}}).to_local().storage().nbytes(), 2 * sizeof(double));
  });
}

} // namespace
} // namespace fsdp
