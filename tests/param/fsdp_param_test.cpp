// Geometry, freeable memory, and the two faces of one parameter.
#include "param/fsdp_param.h"

#include <fsdp/device_mesh.h>
#include <fsdp/distributed.h>
#include <torch/torch.h>

#include "param/freeable_buffer.h"
#include "support/tensors.h"

namespace fsdp::detail {
namespace {

using Sizes = std::vector<int64_t>;
using test::contains;
using test::message_of;

TEST(ShardGeometry, PadsEveryShardToTheLongest) {
  const auto last = shard_geometry("w", {5, 3}, 0, 4, 2);
  EXPECT_EQ(last.shard_sizes, (Sizes{1, 3}));
  EXPECT_EQ(last.offset, 4);
  EXPECT_EQ(last.padded_numel, 6);
  EXPECT_EQ(last.gathered_numel(), 24);
  const auto empty = shard_geometry("w", {5, 3}, 0, 4, 3);
  EXPECT_EQ(empty.shard_sizes, (Sizes{0, 3}));
  EXPECT_EQ(empty.shard_numel(), 0);
  EXPECT_EQ(empty.padded_numel, 6);
  const auto columns = shard_geometry("w", {5, 8}, -1, 4, 1);
  EXPECT_EQ(columns.dim, 1);
  EXPECT_EQ(columns.shard_sizes, (Sizes{5, 2}));
  EXPECT_EQ(columns.offset, 2);
  const auto uneven = shard_geometry("w", {5, 6}, 1, 4, 3);
  EXPECT_EQ(uneven.shard_sizes, (Sizes{5, 0}));
  EXPECT_EQ(uneven.padded_sizes, (Sizes{5, 2}));
  EXPECT_EQ(uneven.shard_sizes_of(2), (Sizes{5, 2}));
  const auto rows = shard_geometry("w", {3, 5, 2}, 0, 4, 3, /*merged_dims=*/2); // 15 rows
  EXPECT_EQ(rows.shard_sizes, (Sizes{1, 3, 2}));
  EXPECT_EQ(rows.divided_sizes, (Sizes{15, 2}));
  EXPECT_EQ(rows.padded_sizes, (Sizes{1, 4, 2}));
  EXPECT_EQ(rows.offset, 12);
  EXPECT_EQ(rows.gathered_numel(), 32);
}

TEST(ShardGeometry, RefusesWithTheParametersName) {
  const auto refused = [](const Sizes& sizes, int64_t dim, const std::string& part) {
    const auto message =
        message_of<c10::Error>([&] { shard_geometry("block.w", sizes, dim, 4, 0); });
    EXPECT_TRUE(contains(message, "block.w"));
    EXPECT_TRUE(contains(message, part));
  };
  refused({}, 0, "Change block.w to a 1D tensor");
  refused({4}, 1, "Shard dim 1 is invalid for 1D tensor");
  for (const auto& [dim, merged_dims] : {std::pair(0, 3), {1, 2}, {0, 0}, {0, -1}}) {
    const auto message =
        message_of<c10::Error>([&] { shard_geometry("block.w", {2, 3}, dim, 4, 0, merged_dims); });
    EXPECT_TRUE(contains(
        message,
        "dims of parameter 'block.w' [2, 3] along dim " + std::to_string(dim) +
            "; merge 2 to 2 dims, the first ones, along dim 0, or return Shard{0} for it"));
  }
}

TEST(FreeableBuffer, KeepsItsStorageObjectAndItsViews) {
  FreeableBuffer buffer(6, torch::kFloat, "gone");
  const auto view = buffer.tensor().narrow(0, 2, 4).view({2, 2});
  buffer.free();
  const auto* storage = view.storage().unsafeGetStorageImpl();
  EXPECT_FALSE(buffer.allocated());
  for (int round = 0; round < 3; ++round) {
    buffer.adopt(torch::empty({6}));
    buffer.tensor().copy_(torch::arange(6.0) + round);
    EXPECT_SAME(view.clone(), torch::tensor({{2.f, 3.f}, {4.f, 5.f}}) + round);
    EXPECT_EQ(view.storage().unsafeGetStorageImpl(), storage);
    buffer.free();
#if TORCH_VERSION_MINOR >= 13
    EXPECT_TRUE(contains(message_of<c10::Error>([&] { view.sum(); }), "gone"));
#endif
  }
}

TEST(FreeableBuffer, TakesMemoryThatIsFilledAlready) {
  FreeableBuffer buffer(3, torch::kFloat, "gone");
  const auto view = buffer.tensor().narrow(0, 1, 2);
  buffer.free();
  const auto filled = torch::arange(3.0).to(torch::kFloat);
  const auto* memory = filled.const_data_ptr();
  buffer.adopt(filled);
  EXPECT_EQ(buffer.tensor().const_data_ptr(), memory); // nothing was copied
  EXPECT_SAME(view.clone(), torch::tensor({1.f, 2.f}));
  EXPECT_EQ(filled.storage().nbytes(), 0u);
  EXPECT_TRUE(buffer.free().is_same(filled)); // which has it again
  EXPECT_FALSE(buffer.allocated());
  EXPECT_EQ(filled.const_data_ptr(), memory);
  EXPECT_SAME(filled, torch::tensor({0.f, 1.f, 2.f}));
}

DataParallelMesh mesh() {
  if (!is_initialized()) {
    init_process_group({.backend = "fake", .rank = 1, .world_size = 4});
  }
  return DataParallelMesh(init_device_mesh(torch::kCPU, {4}));
}

/// A 4 x 2 parameter of which "this rank" holds row 1, with both faces.
struct TwoFaces {
  torch::Tensor whole = torch::arange(8.0).view({4, 2});
  torch::Tensor param = whole.clone().set_requires_grad(true);
  FreeableBuffer buffer{8, torch::kFloat, "gone"};
  FSDPParam managed{param, "w", mesh(), shard_geometry("w", {4, 2}, 0, 4, 1)};

  TwoFaces() {
    managed.attach(torch::zeros({1, 2}), buffer.tensor().view({4, 2}));
    buffer.free();
  }
  void unshard() {
    buffer.adopt(torch::empty({8}));
    {
      torch::NoGradGuard no_grad;
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      buffer.tensor().copy_(whole.view(-1));
    }
    managed.show(Face::Unsharded);
  }
  void reshard() {
    managed.show(Face::Sharded);
    buffer.free();
  }
};

TEST(TwoFaces, ShowTheShardOrTheWholeInOneTensor) {
  TwoFaces w;
  const auto copy = w.param; // as an optimizer holds it
  EXPECT_SAME(copy.detach(), w.whole.narrow(0, 1, 1));
  w.unshard();
  EXPECT_SAME(copy.detach(), w.whole);
  w.reshard();
  EXPECT_SAME(copy.detach(), w.whole.narrow(0, 1, 1));
  EXPECT_TRUE(copy.requires_grad());
  EXPECT_TRUE(copy.is_leaf());
}

TEST(TwoFaces, KeepWhatAutogradSavedAcrossAReshard) {
  TwoFaces w;
  const auto x = torch::ones({3, 2}, torch::requires_grad());
  w.unshard();
  const auto y = x.matmul(w.param.t()).pow(2).sum();
  w.reshard();
  w.unshard();
  y.backward();
  const auto reference = w.whole.clone().set_requires_grad(true);
  const auto x2 = torch::ones({3, 2}, torch::requires_grad());
  x2.matmul(reference.t()).pow(2).sum().backward();
  EXPECT_SAME(x.grad(), x2.grad());
  EXPECT_SAME(w.managed.unsharded_grad(), reference.grad());
}

// Without an accumulator of our own the full gradient would land in `.grad`,
// which belongs to the shard.
TEST(TwoFaces, GradientsOfTheWholeGoIntoTheSlotWhicheverFaceIsShown) {
  TwoFaces w;
  w.unshard();
  const auto a = (w.param * 2).sum();
  const auto b = (w.param * 3).sum();
  a.backward();
  EXPECT_FALSE(w.param.grad().defined());
  w.reshard();
  b.backward(); // late: the shard is shown
  EXPECT_FALSE(w.param.grad().defined());
  EXPECT_SAME(w.managed.take_unsharded_grad(), torch::full({4, 2}, 5.0));
  EXPECT_FALSE(w.managed.unsharded_grad().defined());
}

TEST(TwoFaces, TheShardKeepsTorchsOwnAccumulator) {
  TwoFaces w;
  const auto penalty = (w.param * w.param).sum(); // on the shard, as a regulariser
  w.unshard();
  w.reshard();
  penalty.backward();
  EXPECT_SAME(w.param.grad(), 2 * w.whole.narrow(0, 1, 1));
  EXPECT_FALSE(w.managed.unsharded_grad().defined());
}

// With equal counters a shard of one row would be broadcast, silently.
TEST(TwoFaces, AGraphOfTheWholeThrowsOnTheShard) {
  TwoFaces w;
  const auto x = torch::ones({4, 2}, torch::requires_grad());
  w.unshard();
  const auto y = (x * w.param).sum(); // saves w
  w.managed.show(Face::Sharded);
  EXPECT_TRUE(
      contains(message_of<c10::Error>([&] { y.backward(); }), "modified by an inplace operation"));
}

// Autograd saves a view of the shard, which stays a shard.
TEST(TwoFaces, AGraphOfTheShardIsKept) {
  TwoFaces w;
  const auto x = torch::ones({1, 2}, torch::requires_grad());
  const auto y = (x * w.param).sum();
  w.unshard();
  y.backward();
  EXPECT_SAME(x.grad(), w.whole.narrow(0, 1, 1));
  EXPECT_SAME(w.param.grad(), torch::ones({1, 2}));
}

TEST(TwoFaces, FreezingAndUnfreezingWork) {
  TwoFaces w;
  w.param.set_requires_grad(false);
  w.unshard();
  w.param.set_requires_grad(true);
  (w.param * 2).sum().backward();
  EXPECT_SAME(w.managed.take_unsharded_grad(), torch::full({4, 2}, 2.0));
}

TEST(TwoFaces, RunTheHooksThatTheUserRegistered) {
  TwoFaces w;
  int calls = 0;
  w.param.register_hook([&](const torch::Tensor& grad) {
    ++calls;
    return grad * 10;
  });
  w.unshard();
  (w.param * 1).sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_SAME(w.managed.take_unsharded_grad(), torch::full({4, 2}, 10.0));
}

TEST(TwoFaces, SparseGradientsAreRefusedByName) {
  TwoFaces w;
  w.unshard();
  const auto out = torch::embedding(w.param, torch::tensor({0, 2}), -1, false, /*sparse=*/true);
  EXPECT_TRUE(
      contains(message_of<c10::Error>([&] { out.sum().backward(); }), "'w' got a sparse gradient"));
}

TEST(TwoFaces, ZeroGradCanDetachASharedGradient) {
  TwoFaces w;
  const auto flat = torch::ones({6});
  w.managed.add_sharded_grad(flat.narrow(0, 2, 2).view({1, 2}));
  w.managed.add_sharded_grad(torch::ones({1, 2}));
  EXPECT_SAME(w.param.grad(), torch::full({1, 2}, 2.0));
  w.param.grad().detach_(); // what zero_grad does
  w.param.grad().zero_();
}

TEST(TwoFaces, BackwardAfterTheEndOfTheModuleSaysSo) {
  torch::Tensor loss;
  {
    TwoFaces w;
    w.unshard();
    loss = (w.param * 2).sum();
  }
  // The accumulator went with its owner, so torch's graph has nobody to call.
  EXPECT_TRUE(contains(message_of<c10::Error>([&] { loss.backward(); }), "'w'"));
}

} // namespace
} // namespace fsdp::detail
