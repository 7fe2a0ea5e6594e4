#include <fsdp/device_mesh.h>

#include <torch/torch.h>

#include <fsdp/distributed.h>

#include "support/tensors.h"

namespace fsdp {
namespace {

using test::contains;
using test::message_of;

using Names = std::vector<std::string>;
using Ranks = std::vector<int>;
using Shape = std::vector<int64_t>;

float sum_of_ranks(const ProcessGroup& group) {
  auto tensor = torch::full({1}, static_cast<float>(get_rank()));
  group.all_reduce(tensor);
  return tensor.item<float>();
}

float sum(const Ranks& ranks) {
  return static_cast<float>(std::accumulate(ranks.begin(), ranks.end(), 0));
}

TEST(DeviceMesh, OneAxisIsTheWorld) {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {4}, {"dp"});
    EXPECT_EQ(mesh.ndim(), 1);
    EXPECT_EQ(mesh.size(), 4);
    EXPECT_EQ(mesh.size("dp"), 4);
    EXPECT_EQ(mesh.get_local_rank(), rank);
    EXPECT_EQ(mesh.get_group(), default_group());
    EXPECT_EQ(mesh.str(), "DeviceMesh(cpu, dp=4)");
    EXPECT_EQ(mesh.device_type(), torch::kCPU);
  });
}

TEST(DeviceMesh, FourAxes) {
  run_ranks(16, [](int rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2, 2, 2}, {"pp", "dp", "cp", "tp"});
    EXPECT_EQ(mesh.shape(), (Shape{2, 2, 2, 2}));
    EXPECT_EQ(mesh.names(), (Names{"pp", "dp", "cp", "tp"}));
    EXPECT_EQ(mesh.get_coordinate(), (Shape{rank / 8, rank / 4 % 2, rank / 2 % 2, rank % 2}));
    for (const auto& name : mesh.names()) {
      SCOPED_TRACE(name);
      const auto group = mesh.get_group(name);
      EXPECT_EQ(group.size(), 2);
      EXPECT_EQ(group.rank(), mesh.get_local_rank(name));
      EXPECT_EQ(group.ranks()[group.rank()], rank);
      EXPECT_EQ(sum_of_ranks(group), sum(group.ranks()));
      EXPECT_EQ(mesh[name].get_group(), group); // shared
    }
  });
}

TEST(DeviceMesh, SlicesByOneOrSeveralNames) {
  run_ranks(8, [](int rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2, 2}, {"dp", "cp", "tp"});
    const auto slice = mesh[{"dp", "tp"}];
    EXPECT_EQ(slice.shape(), (Shape{2, 2}));
    EXPECT_EQ(slice.names(), (Names{"dp", "tp"}));
    const int cp = rank / 2 % 2;
    EXPECT_EQ(slice.ranks(), (Ranks{2 * cp, 2 * cp + 1, 4 + 2 * cp, 5 + 2 * cp}));
    EXPECT_EQ(slice.get_coordinate(), (Shape{rank / 4, rank % 2}));
    EXPECT_EQ(slice["tp"], mesh["tp"]);
    EXPECT_EQ(mesh[{"cp"}], mesh["cp"]);
    EXPECT_FALSE(mesh["tp"] == mesh["dp"]);
    EXPECT_EQ(mesh[(Names{"dp", "cp", "tp"})], mesh);
  });
}

TEST(DeviceMesh, FlattensAxesAndRemembersTheName) {
  run_ranks(8, [](int rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2, 2}, {"dp", "cp", "tp"});
    const auto flat = mesh[{"dp", "cp"}].flatten("dp_cp");
    EXPECT_EQ(flat.shape(), Shape{4});
    EXPECT_EQ(flat.names(), Names{"dp_cp"});
    EXPECT_EQ(flat.get_local_rank(), rank / 2);
    EXPECT_EQ(sum_of_ranks(flat.get_group()), sum(flat.ranks()));
    EXPECT_EQ(mesh["dp_cp"], flat);
    EXPECT_EQ(mesh["dp_cp"].get_group(), flat.get_group());
    // Beside another axis.
    const auto both = mesh[{"dp_cp", "tp"}];
    EXPECT_EQ(both.shape(), (Shape{4, 2}));
    EXPECT_EQ(both.get_coordinate(), (Shape{rank / 2, rank % 2}));
    // Axes that are not neighbours, under the default name.
    const auto apart = mesh[{"dp", "tp"}].flatten();
    EXPECT_EQ(apart.names(), Names{"dp_tp"});
    const int cp = rank / 2 % 2;
    EXPECT_EQ(apart.ranks(), (Ranks{2 * cp, 2 * cp + 1, 4 + 2 * cp, 5 + 2 * cp}));
    EXPECT_EQ((mesh[{"dp", "cp"}].flatten("dp_cp")), flat); // once more
    const auto other = mesh[{"cp", "tp"}];
    EXPECT_THROW(other.flatten("dp_cp"), c10::ValueError);
    EXPECT_THROW(other.flatten("dp"), c10::ValueError);
  });
}

TEST(DeviceMesh, MeshesOfTheSameRanksShareTheirGroups) {
  run_ranks(4, [](int) {
    const auto a = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    const auto b = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    EXPECT_EQ(a.get_group(0), b.get_group(0));
    EXPECT_EQ(a.get_group(1), b.get_group(1));
    EXPECT_FALSE(a == b);
  });
}

TEST(DeviceMesh, FromGroups) {
  run_ranks(4, [](int) {
    const auto grid = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    const std::vector<ProcessGroup> groups{grid.get_group(0), grid.get_group(1)};
    const auto made =
        DeviceMesh::from_groups(torch::kCPU, groups, {"replicate", "shard"}, {0, 1, 2, 3});
    EXPECT_EQ(made, grid);
    EXPECT_EQ(made.shape(), grid.shape());
    EXPECT_EQ(made.ranks(), grid.ranks());
    EXPECT_EQ(made.get_coordinate(), grid.get_coordinate());
    for (const auto* name : {"replicate", "shard"}) {
      EXPECT_EQ(made[name].ranks(), grid[name].ranks());
      EXPECT_EQ(made[name].get_group(), grid[name].get_group());
    }
    const auto line = DeviceMesh::from_groups(torch::kCPU, {grid.get_group(0)}, {"dp"});
    EXPECT_EQ(line.ranks(), grid["replicate"].ranks());
    EXPECT_EQ(line.get_coordinate(), grid["replicate"].get_coordinate());
    EXPECT_EQ(line.get_group(), grid.get_group(0));

    const auto refused = [](const std::string& part, const auto& make) {
      EXPECT_TRUE(contains(message_of<c10::ValueError>(make), part));
    };
    refused("there is no group", [] { DeviceMesh::from_groups(torch::kCPU, {}); });
    refused("do not tell which ranks", [&] { DeviceMesh::from_groups(torch::kCPU, groups); });
    refused("make a mesh of 4 ranks, but 2 are given", [&] {
      DeviceMesh::from_groups(torch::kCPU, groups, {}, {0, 1});
    });
    refused("the group of axis 0 has the ranks", [&] {
      DeviceMesh::from_groups(torch::kCPU, groups, {}, {0, 2, 1, 3});
    });
    EXPECT_EQ(made.flatten().get_group(), grid.whole_group());
    EXPECT_EQ(grid.whole_group().ranks(), grid.ranks());
  });
}

TEST(DeviceMesh, RefusesWhatDoesNotFit) {
  run_ranks(4, [](int) {
    const auto refused = [](const std::string& part, const auto& make) {
      EXPECT_TRUE(contains(message_of<c10::ValueError>(make), part));
    };
    refused("[2, 3] multiplies to 6, but the world has 4 ranks", [] {
      init_device_mesh(torch::kCPU, {2, 3}, {"a", "b"});
    });
    refused("but the world has 4", [] { init_device_mesh(torch::kCPU, {}); });
    refused("positive", [] { init_device_mesh(torch::kCPU, {-2, -2}); });
    refused("1 names (a) for 2 axes", [] { init_device_mesh(torch::kCPU, {2, 2}, {"a"}); });
    refused("not all different", [] { init_device_mesh(torch::kCPU, {2, 2}, {"a", "a"}); });

    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    EXPECT_TRUE(contains(
        message_of<c10::IndexError>([&] { mesh["pp"]; }), "has no axis 'pp'; it has dp, tp"));
    EXPECT_TRUE(contains(message_of<c10::IndexError>([&] { mesh.get_group("pp"); }), "'pp'"));
    EXPECT_TRUE(contains(message_of<c10::IndexError>([&] { mesh.size(2); }), "no axis 2"));
    refused("own order", [&] { mesh[{"tp", "dp"}]; });
    refused("own order", [&] { mesh[{"dp", "dp"}]; });
    refused("say which", [&] { mesh.get_group(); });
    const auto nameless = init_device_mesh(torch::kCPU, {2, 2});
    EXPECT_EQ(nameless.get_group(1).size(), 2);
    refused("no axis names", [&] { nameless["dp"]; });
    refused("no axis names", [&] { nameless.flatten("x"); });
  });
}

TEST(DeviceMesh, NeedsAWorld) {
  EXPECT_TRUE(contains(
      message_of<c10::Error>([] { init_device_mesh(torch::kCPU, {1}); }), "init_process_group"));
}

} // namespace
} // namespace fsdp
