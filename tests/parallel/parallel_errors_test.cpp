// What parallelize_module refuses: before any collective, and by name.
#include <fsdp/nn.h>

#include "parallel/tp_models.h"

namespace fsdp {
namespace {

using namespace test;

/// Throws with all of `parts` in its message, without a collective, and changes
/// nothing.
template <class Error = c10::ValueError, class Statement>
void refused(
    const torch::nn::Module& net, Statement statement, const std::vector<std::string>& parts) {
  std::vector<std::vector<int64_t>> before;
  for (const auto& param : net.parameters()) {
    before.push_back(param.sizes().vec());
  }
  CommDebugMode comm;
  const auto message = message_of<Error>(statement);
  for (const auto& part : parts) {
    EXPECT_TRUE(contains(message, part));
  }
  EXPECT_EQ(comm.total(), 0);
  size_t i = 0;
  for (const auto& param : net.parameters()) {
    EXPECT_EQ(param.sizes(), before[i++]);
  }
}

class ParallelErrors : public testing::Test {
 protected:
  static void run(const std::function<void(const DeviceMesh& tp)>& body) {
    run_ranks(2, [&](int) { body(init_device_mesh(torch::kCPU, {2}, {"tp"})); });
  }
};

TEST_F(ParallelErrors, ModulesThatAreNotThere) {
  run([](const DeviceMesh& tp) {
    auto net = seeded<Transformer>(ModelArgs{});
    const auto refuse = [&](const std::string& name, const std::vector<std::string>& parts) {
      refused(
          *net,
          [&] {
            parallelize_module(net, tp, {{"norm", SequenceParallel{}}, {name, ColwiseParallel{}}});
          },
          parts);
    };
    refuse(
        "layers.*.atention.wq",
        {"names 'layers.*.atention.wq'", "mesh axis 'tp'",
         "'atention' is none of the modules in 'layers.0' (fsdp::test::TransformerBlockImpl): "
         "attention_norm, attention, ffn_norm, feed_forward"});
    refuse(
        "ouput", {"'ouput' is none of", "tok_embeddings, pos_embeddings, dropout, layers, norm"});
    refuse("layers.0.attention.wq.weight", {"'weight' is none of the modules in", "wq"});
    refuse("layers..attention", {"'' is none of the modules"});
  });
}

TEST_F(ParallelErrors, ModulesThatDoNotFit) {
  run([](const DeviceMesh& tp) {
    auto net = seeded<Transformer>(ModelArgs{});
    refused(
        *net, [&] { parallelize_module(net, tp, {{"dropout", SequenceParallel{}}}); },
        {"'dropout' (torch::nn::DropoutImpl) is not hooked", "mesh axis 'tp'", "FSDP_MODULE"});
    refused(
        *net, [&] { parallelize_module(net, tp, {{"layers", SequenceParallel{}}}); },
        {"'layers' (torch::nn::ModuleListImpl) is not hooked"});
    for (const char* name : {"norm", "layers.1.attention"}) {
      refused<c10::NotImplementedError>(
          *net, [&] { parallelize_module(net, tp, {{name, ColwiseParallel{}}}); },
          {"ColwiseParallel currently only supports Linear and Embedding, not '" +
           std::string(name) + "'"});
    }
    refused<c10::NotImplementedError>(
        *net, [&] { parallelize_module(net->norm, tp, RowwiseParallel{}); },
        {"RowwiseParallel currently only supports", "the torch::nn::LayerNormImpl"});
    auto table = seeded<Embedding>(torch::nn::EmbeddingOptions(4, 4).max_norm(1));
    refused<c10::NotImplementedError>(
        *table, [&] { parallelize_module(table, tp, RowwiseParallel{}); }, {"max_norm"});
  });
}

TEST_F(ParallelErrors, MeshesAndLayoutsThatDoNotFit) {
  run([](const DeviceMesh& tp) {
    auto net = seeded<MLP>(4);
    const auto grid = init_device_mesh(torch::kCPU, {1, 2}, {"dp", "tp"});
    refused(
        *net, [&] { parallelize_module(net, grid, mlp_plan()); },
        {"needs a mesh of one axis, not DeviceMesh(cpu, dp=1, tp=2)"});
    refused(
        *net,
        [&] {
          parallelize_module(
              net, tp, {{"in_proj", ColwiseParallel{.output_layouts = StridedShard{0, 2}}}});
        },
        {"output_layouts of 'in_proj'", "_S(0, 2)", "mesh axis 'tp'"});
    refused(
        *net,
        [&] {
          parallelize_module(
              net, tp,
              PrepareModuleInput{
                  .input_layouts = {Shard{0}, Shard{1}}, .desired_input_layouts = Replicate{}});
        },
        {"input_layouts and desired_input_layouts should have same length, not 2 and 1"});
    // What only a call can show.
    parallelize_module(net, tp, mlp_plan(Shard{2}));
    const auto message = message_of<c10::ValueError>([&] { net(torch::ones({2, 4})); });
    EXPECT_TRUE(contains(
        message,
        "output 0 of 'out_proj' (fsdp::test::LinearImpl) has sizes [2, 4], which mesh axis "
        "'tp' of DeviceMesh(cpu, tp=2) cannot divide as S(2) says"));
    auto rows = seeded<Linear>(8, 3);
    parallelize_module(rows, tp, RowwiseParallel{});
    refused(
        *rows, [&] { rows(torch::ones({2, 8})); },
        {"input 0 of the fsdp::test::LinearImpl has sizes [2, 8]", "mesh axis 'tp'",
         "holds 4 of 8 input features"});
    auto norm = seeded<LayerNorm>(torch::nn::LayerNormOptions({4}));
    parallelize_module(norm, tp, SequenceParallel{.sequence_dim = 2});
    refused(*norm, [&] { norm(torch::ones({2, 4})); }, {"cannot divide along dim 2"});
    auto table = seeded<Embedding>(5, 4);
    parallelize_module(table, tp, RowwiseParallel{.input_layouts = Replicate{}});
    refused<c10::Error>(
        *table, [&] { table(torch::arange(6)); },
        {"has a number that is none of the table's rows"});
  });
}

TEST_F(ParallelErrors, ModulesThatAreParallelOrShardedAlready) {
  run([](const DeviceMesh& tp) {
    auto net = seeded<MLP>(4);
    refused(
        *net,
        [&] {
          parallelize_module(net, tp, {{"in_proj", ColwiseParallel{}}, {"*", RowwiseParallel{}}});
        },
        {"'in_proj' (fsdp::test::LinearImpl) is parallelized by two entries", "mesh axis 'tp'"});
    parallelize_module(net, tp, {{"in_proj", ColwiseParallel{}}});
    refused(
        *net, [&] { parallelize_module(net, tp, mlp_plan()); },
        {"'in_proj' (fsdp::test::LinearImpl) has been parallelized already, by ColwiseParallel",
         "mesh axis 'tp'"});
    fully_shard(net->out_proj, {.mesh = tp});
    refused(
        *net, [&] { parallelize_module(net, tp, {{"out_proj", RowwiseParallel{}}}); },
        {"parameter 'out_proj.weight' of 'out_proj'", "sharded by fully_shard already",
         "DeviceMesh(cpu, tp=2)", "comes before fully_shard"});
  });
}

TEST_F(ParallelErrors, SharedParametersThatWouldDisagree) {
  run([](const DeviceMesh& tp) {
    auto net = seeded<Transformer>(ModelArgs{.weight_tying = true});
    const RowwiseParallel rows{.input_layouts = Replicate{}};
    refused(
        *net, [&] { parallelize_module(net, tp, {{"tok_embeddings", rows}}); },
        {"parameter 'output.weight' is shared with 'tok_embeddings.weight'", "mesh axis 'tp'",
         "S(0)", "one plan"});
    refused(
        *net,
        [&] {
          parallelize_module(net, tp, {{"tok_embeddings", rows}, {"output", RowwiseParallel{}}});
        },
        {"parameters 'tok_embeddings.weight' and 'output.weight' are one", "S(0) and as S(1)"});
    // Alone its sites cannot be seen; the second has to agree.
    parallelize_module(net->tok_embeddings, tp, rows);
    refused(
        *net, [&] { parallelize_module(net->output, tp, RowwiseParallel{}); },
        {"parameter 'weight' of the fsdp::test::LinearImpl lies (S(0)) on DeviceMesh(cpu, tp=2)",
         "cannot lie (S(1))"});
    parallelize_module(net->output, tp, ColwiseParallel{.output_layouts = Replicate{}});
    auto reference = seeded<Transformer>(ModelArgs{.weight_tying = true});
    net->eval();
    reference->eval();
    const auto tokens = tp_tokens(0, {2, 8}, 8);
    EXPECT_TRUE(near(net(tokens).detach(), reference(tokens).detach(), 1e-5));
    // A member that was assigned is another tensor than the one that is trained.
    auto tied = seeded<MLP>(4);
    tied->in_proj->weight = torch::ones({16, 4});
    refused(
        *tied, [&] { parallelize_module(tied, tp, mlp_plan()); },
        {"'in_proj.weight'", "tie_weights"});
  });
}

TEST_F(ParallelErrors, MeshesOfFullyShardThatDoNotGoTogether) {
  run([](const DeviceMesh& tp) {
    auto net = seeded<MLP>(4);
    parallelize_module(net, tp, mlp_plan());
    refused(
        *net, [&] { fully_shard(net, {.mesh = tp}); },
        {"parameter 'in_proj.weight'", "overlapping", "DeviceMesh(cpu, tp=2)"});
    const auto other = init_device_mesh(torch::kCPU, {2}, {"dp"});
    refused(
        *net, [&] { fully_shard(net, {.mesh = other}); },
        {"parameter 'in_proj.weight'", "derived from different device meshs"});
    refused(
        *net, [&] { distribute_parameter(net->in_proj, "weight", tp, {Shard{1}}); },
        {"lies (S(0)) on DeviceMesh(cpu, tp=2) already"});
    auto blocks = seeded<Linear>(4, 4);
    const auto grid = init_device_mesh(torch::kCPU, {1, 2}, {"dp", "tp"});
    distribute_parameter(blocks, "weight", grid["tp"], {BlockShard{2}});
    refused(
        *blocks, [&] { fully_shard(blocks, {.mesh = grid["dp"]}); },
        {"parameter 'weight'",
         "it is divided by a BlockShard already, and nothing can be divided after that"});
    refused(
        *net, [&] { distribute_parameter(net->in_proj, "wait", tp, {Shard{1}}); },
        {"has no parameter 'wait' to divide over DeviceMesh(cpu, tp=2); it has weight, bias"});
  });
}

// A user's own module, with pieces over two axes: experts, their hidden units.
struct ExpertsImpl : torch::nn::Module {
  explicit ExpertsImpl(const DeviceMesh* mesh = nullptr)
      : w1(register_parameter("w1", torch::randn({4, 6, 3}))),
        w2(register_parameter("w2", torch::randn({4, 3, 6}))),
        mesh(mesh) {}
  torch::Tensor forward(torch::Tensor x) {
    const auto move = [&](const char* axis, Placement from, Placement to, bool sum = false) {
      x = mesh ? redistribute(
                     x, (*mesh)[axis], from, to,
                     {.grad_placement = sum ? std::optional<Placement>(Partial{}) : std::nullopt})
               : x;
    };
    move("ep", Shard{0}, Replicate{}, true);
    move("tp", Replicate{}, Replicate{}, true);
    x = x.unsqueeze(0).matmul(w1.transpose(1, 2)).relu().matmul(w2.transpose(1, 2)).sum(0);
    move("tp", Partial{}, Replicate{});
    move("ep", Partial{}, Shard{0});
    return x;
  }
  torch::Tensor w1, w2;
  const DeviceMesh* mesh;
};
FSDP_MODULE(Experts);

TEST(DistributeParameter, ForAModuleThatKnowsOfItsPieces) {
  run_ranks(8, [](int) {
    const auto grid = init_device_mesh(torch::kCPU, {2, 2, 2}, {"dp", "ep", "tp"});
    const auto experts_mesh = grid[{"ep", "tp"}];
    auto net = in_double<Experts>(&experts_mesh);
    auto reference = in_double<Experts>();
    distribute_parameter(net, "w1", experts_mesh, {Shard{0}, Shard{1}});
    distribute_parameter(net, "w2", experts_mesh, {Shard{0}, Shard{-1}});
    fully_shard(net, {.mesh = grid["dp"]});
    EXPECT_EQ(
        as_dtensor(net->w1).placements(),
        (std::vector<Placement>{StridedShard{0, 2}, Shard{0}, Shard{1}}));
    EXPECT_EQ(
        as_dtensor(net->w2).placements(),
        (std::vector<Placement>{StridedShard{0, 2}, Shard{0}, Shard{2}}));
    EXPECT_SAME(as_dtensor(net->w1).full_tensor(), reference->w1.detach());
    EXPECT_SAME(as_dtensor(net->w2).full_tensor(), reference->w2.detach());
    const auto weight = tp_batch(5, {8, 3});
    const auto dp = grid.get_local_rank("dp");
    const auto ep = grid.get_local_rank("ep");
    // Each ep rank has half of its dp rank's tokens, and the loss of those.
    net((tp_batch(0, {8, 3}, dp).narrow(0, 4 * ep, 4)))
        .mul(weight.narrow(0, 4 * ep, 4))
        .sum()
        .backward();
    reference(tp_batch(0, {8, 3}, dp)).mul(weight).sum().backward();
    average_gradients(*reference);
    expect_parity(*net, *reference);
  });
}

} // namespace
} // namespace fsdp
