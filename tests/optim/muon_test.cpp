// Muon on sharded matrices against the formula on whole ones.
#include <fsdp/debug.h>
#include <fsdp/muon.h>
#include <fsdp/state_dict.h>
#include <fsdp/tensor_parallel.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;
using optim::Muon;
using optim::MuonOptions;
using torch::optim::OptimizerParamGroup;
using Tensors = std::vector<torch::Tensor>;

/// Without rounding that depends on the order of sums.
MuonOptions exact(double lr = 0.02) {
  return MuonOptions(lr).ns_dtype(at::kDouble);
}

/// Matrices of many shapes: tall, wide, square, of one row; a stack, a convolution, heads; and
/// what AdamW takes.
struct ShapesImpl : torch::nn::Module {
  ShapesImpl() {
    const std::vector<std::vector<int64_t>> sizes{{9, 4},    {4, 9},       {6, 6}, {6, 6}, {1, 5},
                                                  {5, 3, 4}, {6, 2, 3, 2}, {8, 3}, {7},    {10, 4}};
    for (const auto& each : sizes) {
      const auto name = "p" + std::to_string(params.size());
      params.push_back(register_parameter(name, torch::randn(each, torch::kDouble)));
    }
  }
  /// The gradient of every parameter differs in each step and on each rank.
  torch::Tensor forward(const torch::Tensor& factor) {
    auto sum = torch::zeros({}, params[0].options());
    for (const auto& param : params) {
      sum = sum + (torch::sin(factor.to(param.scalar_type()) * param) * param).sum();
    }
    return sum;
  }
  Tensors params;
};
FSDP_MODULE(Shapes);

Muon optimizer_of(const Shapes& net) {
  const auto params = net->parameters();
  const auto group = [](Tensors members, const MuonOptions& options) {
    return OptimizerParamGroup(std::move(members), std::make_unique<MuonOptions>(options));
  };
  return Muon(
      {group({params.begin(), params.begin() + 7}, exact().weight_decay(0.3)),
       group({params[7]}, exact(0.01).blocks(4).nesterov(false).match_rms_adamw(true)),
       group({params[8]}, exact(0.01).momentum(0.8)),
       group({params[9]}, exact(0.003).adamw(true))});
}

/// torch.optim.Muon's step for one matrix, by its formula.
void step_by_hand(
    const torch::Tensor& param,
    const torch::Tensor& grad,
    torch::Tensor& momentum,
    const MuonOptions& options) {
  momentum = options.momentum() * momentum + (1 - options.momentum()) * grad;
  auto x = options.nesterov() ? (1 - options.momentum()) * grad + options.momentum() * momentum
                              : momentum.clone();
  const bool is_tall = x.size(0) > x.size(1);
  x = is_tall ? x.t() : x;
  x = x / x.norm();
  for (int i = 0; i < 5; ++i) {
    const auto gram = x.mm(x.t());
    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram.mm(gram)).mm(x);
  }
  const auto rows = static_cast<double>(param.size(0));
  const auto columns = static_cast<double>(param.size(1));
  const auto factor = options.match_rms_adamw() ? 0.2 * std::sqrt(std::max(rows, columns))
                                                : std::sqrt(std::max(1.0, rows / columns));
  param.mul_(1 - options.lr() * options.weight_decay());
  param.sub_(options.lr() * factor * (is_tall ? x.t() : x));
}

/// The matrices in a whole parameter.
Tensors matrices_in(const torch::Tensor& param, int64_t blocks) {
  Tensors matrices;
  for (const auto& layer : param.dim() == 3 ? param.unbind(0) : Tensors{param.flatten(1)}) {
    for (const auto& block : layer.chunk(blocks)) {
      matrices.push_back(block);
    }
  }
  return matrices;
}

double factor_of(int step, int rank) {
  return 0.7 + 0.1 * step + 0.3 * rank;
}

void backward(Shapes& net, int step, int rank) {
  net->zero_grad();
  net(torch::tensor(factor_of(step, rank))).backward();
}

/// Trains `net` next to a whole model on which the unsharded Muon steps. `data` tells the ranks'
/// inputs apart.
void expect_parity_in_training(
    Shapes& net, int data = get_rank(), const std::function<void(Muon&)>& prepare = {}) {
  auto reference = seeded<Shapes>();
  auto optimizer = optimizer_of(net);
  auto expected = optimizer_of(reference);
  if (prepare) {
    prepare(optimizer);
  }
  for (int step = 0; step < 4; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    backward(net, step, data);
    backward(reference, step, data);
    average_gradients(*reference);
    optimizer.step();
    expected.step();
    expect_parity(*net, *reference, 1e-10);
  }
}

/// Dim 1 for some, so that parts are columns.
std::optional<ShardPlacement> odd_dims(const std::string& name, const torch::Tensor& param) {
  return param.dim() > 1 && (name == "p1" || name == "p5" || name == "p6")
             ? std::optional<ShardPlacement>(Shard{1})
             : std::nullopt;
}

/// Ranks have parts of one or several matrices of a stack.
std::optional<ShardPlacement> rows_of_stacks(const std::string&, const torch::Tensor& param) {
  return param.dim() > 2 ? std::optional<ShardPlacement>(BlockShard{2}) : std::nullopt;
}

// ------------------------------------------------------------ One rank

TEST(Muon, EqualsTheFormula) {
  auto net = seeded<Shapes>();
  auto reference = seeded<Shapes>();
  auto optimizer = optimizer_of(net);
  torch::optim::AdamW adamw(
      {OptimizerParamGroup(
           {reference->params[8]}, std::make_unique<torch::optim::AdamWOptions>(
                                       torch::optim::AdamWOptions(0.01).weight_decay(0.1))),
       OptimizerParamGroup(
           {reference->params[9]}, std::make_unique<torch::optim::AdamWOptions>(
                                       torch::optim::AdamWOptions(0.003).weight_decay(0.1)))},
      {});
  std::vector<Tensors> momentum(8);
  for (int step = 0; step < 4; ++step) {
    backward(net, step, 0);
    backward(reference, step, 0);
    optimizer.step();
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < 8; ++i) {
      const auto& options =
          static_cast<const MuonOptions&>(optimizer.param_groups()[i / 7].options());
      const auto params = matrices_in(reference->params[i], options.blocks());
      const auto grads = matrices_in(reference->params[i].grad(), options.blocks());
      momentum[i].resize(params.size());
      for (size_t j = 0; j < params.size(); ++j) {
        auto& kept = momentum[i][j];
        kept = kept.defined() ? kept : torch::zeros_like(params[j]);
        step_by_hand(params[j], grads[j], kept, options);
      }
    }
    adamw.step();
    expect_parity(*net, *reference, 1e-10);
  }
}

TEST(Muon, SkipsParametersWithoutAGradient) {
  auto net = seeded<Shapes>();
  auto optimizer = optimizer_of(net);
  backward(net, 0, 0);
  const auto before = net->params[2].detach().clone();
  net->params[2].mutable_grad().reset();
  optimizer.step();
  EXPECT_SAME(net->params[2].detach(), before);
  EXPECT_FALSE(optimizer.state().count(net->params[2].unsafeGetTensorImpl()));
  backward(net, 1, 0); // now it has one
  optimizer.step();
  EXPECT_FALSE(net->params[2].detach().equal(before));
}

TEST(Muon, ArchivesHoldItsStateAndOptions) {
  auto net = seeded<Shapes>();
  auto optimizer = optimizer_of(net);
  backward(net, 0, 0);
  optimizer.step();
  std::stringstream stream;
  torch::save(optimizer, stream);
  auto copy = seeded<Shapes>();
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < net->params.size(); ++i) {
      copy->params[i].copy_(net->params[i]);
    }
  }
  Muon loaded(
      {OptimizerParamGroup({copy->params.begin(), copy->params.begin() + 7}),
       OptimizerParamGroup({copy->params[7]}), OptimizerParamGroup({copy->params[8]}),
       OptimizerParamGroup({copy->params[9]})});
  torch::load(loaded, stream);
  backward(net, 1, 0);
  backward(copy, 1, 0);
  optimizer.step();
  loaded.step();
  expect_parity(*copy, *net, 0);
}

TEST(Muon, RefusesOptionsThatCannotBe) {
  const Tensors params{torch::randn({6, 4}).set_requires_grad(true)};
  const auto message = [&](const MuonOptions& options) {
    return message_of<c10::ValueError>([&] { Muon(params, options); });
  };
  EXPECT_TRUE(contains(message(MuonOptions(-1)), "lr is -1, not 0 or more"));
  EXPECT_TRUE(contains(message(MuonOptions().momentum(-1)), "momentum is -1"));
  EXPECT_TRUE(contains(message(MuonOptions().ns_steps(100)), "ns_steps is 100, not from 0 to 99"));
  EXPECT_TRUE(contains(message(MuonOptions().blocks(0)), "blocks is 0, not above 0"));
  EXPECT_TRUE(
      contains(message(MuonOptions().ns_dtype(at::kLong)), "ns_dtype is Long, not BFloat16"));
  Muon optimizer(params, MuonOptions().blocks(5));
  params[0].mutable_grad() = torch::ones({6, 4});
  EXPECT_TRUE(contains(
      message_of<c10::ValueError>([&] { optimizer.step(); }),
      "[Muon] parameter 0 of group 0 has 6 rows, which 5 blocks cannot share"));
  EXPECT_THROW(optimizer.set_exchange_numel(0), c10::ValueError);
}

// ------------------------------------------------------------ Many ranks

TEST(Muon, ShardedEqualsUnsharded) {
  for (const int n : {1, 2, 3, 4, 7}) {
    run_ranks(n, [n](int) {
      for (const auto& placements : {odd_dims, rows_of_stacks}) {
        for (const int64_t numel : {1, 30, 100000}) {
          SCOPED_TRACE(c10::str(n, " ranks, ", numel, " elements at a time"));
          auto net = seeded<Shapes>();
          fully_shard(net, {.shard_placement_fn = placements});
          expect_parity_in_training(
              net, get_rank(), [&](Muon& muon) { muon.set_exchange_numel(numel); });
        }
      }
    });
  }
}

TEST(Muon, ReplicasDivideTheMatrices) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"replicate", "shard"});
    for (const auto& placements : {odd_dims, rows_of_stacks}) {
      auto net = seeded<Shapes>();
      fully_shard(net, {.mesh = mesh, .shard_placement_fn = placements});
      expect_parity_in_training(net);
    }
  });
}

TEST(Muon, TensorParallelAndSharded) {
  for (const bool by_rows : {false, true}) {
    run_ranks(4, [by_rows](int) {
      const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
      auto net = seeded<MLP>(6);
      auto reference = seeded<MLP>(6);
      net->to(torch::kDouble);
      reference->to(torch::kDouble);
      if (by_rows) {
        parallelize_module(
            net, mesh["tp"], {{"in_proj", ColwiseParallel{}}, {"out_proj", RowwiseParallel{}}});
      }
      fully_shard(net, {.mesh = mesh["dp"]});
      Muon optimizer(net->parameters(), exact());
      Muon expected(reference->parameters(), exact());
      for (int step = 0; step < 4; ++step) {
        SCOPED_TRACE("step " + std::to_string(step));
        for (auto* each : {&net, &reference}) {
          (*each)->zero_grad();
          const auto x = torch::randn(
              {4, 6}, generator(10 * step + get_rank() / 2), torch::kDouble); // one per pair
          (*each)(x.to(test_device())).pow(2).sum().backward();
        }
        average_gradients(*reference);
        optimizer.step();
        expected.step();
        expect_parity(*net, *reference, 1e-10);
      }
    });
  }
}

/// A plain model on every rank, and one that is sharded over one rank: nobody needs the others.
TEST(Muon, CommunicatesOnlyIfAMatrixIsDivided) {
  run_ranks(2, [](int) {
    auto plain = seeded<Shapes>();
    auto optimizer = optimizer_of(plain);
    backward(plain, 0, 0);
    CommDebugMode comm;
    optimizer.step();
    EXPECT_EQ(comm.total(), 0);
  });
  run_ranks(1, [](int) {
    auto net = seeded<Shapes>();
    fully_shard(net);
    auto optimizer = optimizer_of(net);
    backward(net, 0, 0);
    CommDebugMode comm;
    optimizer.step();
    EXPECT_EQ(comm.count("all_to_all"), 0);
  });
}

TEST(Muon, TwoExchangesForEachBucket) {
  run_ranks(4, [](int) {
    auto net = seeded<Stack>(8, 6);
    fully_shard(net);
    Muon optimizer(net->parameters(), MuonOptions(0.01));
    optimizer.set_exchange_numel(8 * 32 * 4 / 4); // 4 matrices of 12
    const auto step = [&] {
      net(random_batch(0, {2, 8})).sum().backward();
      CommDebugMode comm;
      optimizer.step();
      return comm.calls();
    };
    step();
    auto calls = step();
    if (test_device() == c10::kCPU) { // a comparison of the ranks
      ASSERT_EQ(calls[0].op, "all_gather");
      calls.erase(calls.begin());
    }
    ASSERT_EQ(calls.size(), 6);
    for (const auto& call : calls) {
      EXPECT_EQ(call.op, "all_to_all");
      EXPECT_EQ(call.bytes, 8 * 32 * 2); // a matrix per rank, in bf16, without padding
    }
  });
}

TEST(Muon, ResumesOnAnyNumberOfRanks) {
  StateDict kept;
  StateDict weights;
  Tensors expected;
  const StateDictOptions full{.full_state_dict = true};
  const StateDictOptions from_0{.broadcast_from_rank0 = true};
  const auto train = [](Shapes& net, Muon& optimizer, int first, int count) {
    for (int step = first; step < first + count; ++step) {
      backward(net, step, 0);
      optimizer.step();
    }
  };
  run_ranks(3, [&](int rank) {
    auto net = seeded<Shapes>();
    fully_shard(net);
    auto optimizer = optimizer_of(net);
    train(net, optimizer, 0, 2);
    const auto state = get_optimizer_state_dict(net, optimizer, full);
    const auto model = get_model_state_dict(net, full);
    train(net, optimizer, 2, 2);
    const auto last = get_model_state_dict(net, full);
    if (rank == 0) {
      kept = state;
      weights = model;
      for (const auto& [name, value] : last) {
        expected.push_back(std::get<at::Tensor>(value));
      }
    }
  });
  EXPECT_TRUE(kept.contains("state.p0.momentum_buffer"));
  EXPECT_FALSE(kept.contains("state.p0.step"));
  EXPECT_FALSE(kept.contains("state.p8.momentum_buffer"));
  EXPECT_TRUE(kept.contains("state.p9.exp_avg_sq"));
  EXPECT_EQ(std::get<bool>(kept.at("param_groups.p9.adamw")), true);
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [&](int rank) {
      auto net = seeded<Shapes>();
      fully_shard(net, {.shard_placement_fn = odd_dims});
      auto optimizer = optimizer_of(net);
      set_model_state_dict(net, rank == 0 ? weights : StateDict(), from_0);
      set_optimizer_state_dict(net, optimizer, rank == 0 ? kept : StateDict(), from_0);
      train(net, optimizer, 2, 2);
      const auto last = get_model_state_dict(net, full);
      if (rank == 0) {
        size_t i = 0;
        for (const auto& [name, value] : last) {
          EXPECT_TRUE(near(std::get<at::Tensor>(value), expected[i++], 1e-10)) << name;
        }
      }
    });
  }
}

/// The message of a step on all ranks, before which `change` makes this rank differ.
std::vector<std::string> refusals(const std::function<void(int rank, Shapes&, Muon&)>& change) {
  std::vector<std::string> messages(2);
  run_ranks(2, [&](int rank) {
    auto net = seeded<Shapes>();
    fully_shard(net);
    auto optimizer = optimizer_of(net);
    for (int step = 0; step < 2; ++step) {
      backward(net, step, rank);
      if (step == 0) {
        optimizer.step(); // with a plan that is there already
      }
    }
    change(rank, net, optimizer);
    const auto before = as_dtensor(net->params[0]).to_local().clone();
    messages[rank] = message_of<c10::ValueError>([&] { optimizer.step(); });
    EXPECT_SAME(as_dtensor(net->params[0]).to_local(), before);
  });
  return messages;
}

TEST(Muon, RanksThatBringOtherMatricesAllThrow) {
  if (test_device() != c10::kCPU) {
    GTEST_SKIP() << "on a GPU the ranks compare new plans only";
  }
  const auto expect = [](const std::string& part, const auto& change) {
    for (const auto& message : refusals(change)) {
      EXPECT_TRUE(contains(message, part)) << message;
    }
  };
  expect(
      "parameter 1 of group 0 ('p1') has a gradient on rank 0 and none on rank 1",
      [](int rank, Shapes& net, Muon&) {
        if (rank == 1) {
          net->params[1].mutable_grad().reset();
        }
      });
  expect(
      "parameter 0 of group 0 ('p0') has a gradient on rank 1", [](int rank, Shapes& net, Muon&) {
        if (rank == 0) {
          net->zero_grad();
        }
      });
  expect(
      "('p7') has other options, sizes or placements on rank 1", [](int rank, Shapes&, Muon& muon) {
        static_cast<MuonOptions&>(muon.param_groups()[1].options()).momentum(0.5 + 0.1 * rank);
      });
  expect("set_exchange_numel", [](int rank, Shapes&, Muon& muon) {
    muon.set_exchange_numel(1000 + rank);
  });
}

TEST(Muon, ParametersOnTwoMeshes) {
  run_ranks(4, [](int) {
    const auto pairs = init_device_mesh(test_device(), {2, 2}, {"a", "b"})["b"];
    auto net = seeded<Shapes>();
    fully_shard(
        net, {.shard_placement_fn = [&](const std::string& name,
                                        const torch::Tensor&) -> std::optional<ShardPlacement> {
          return name == "p0" || name == "p5" ? std::optional(ShardPlacement{0, pairs})
                                              : std::nullopt;
        }});
    expect_parity_in_training(net, 0); // gradients are means over different ranks
  });
}

TEST(Muon, AStepWithoutGradientsDoesNothing) {
  run_ranks(2, [](int) {
    auto net = seeded<Shapes>();
    fully_shard(net);
    auto optimizer = optimizer_of(net);
    backward(net, 0, 0);
    optimizer.step();
    optimizer.set_exchange_numel(std::numeric_limits<int64_t>::max());
    optimizer.zero_grad();
    optimizer.step();
    backward(net, 1, 0);
    optimizer.step();
  });
}

TEST(Muon, RefusesWhatIsNoMatrixOfRealNumbersOrNoOption) {
  const auto matrix = torch::randn({4, 4}, torch::kComplexFloat).set_requires_grad(true);
  matrix.mutable_grad() = torch::ones({4, 4}, torch::kComplexFloat);
  Muon optimizer(Tensors{matrix});
  EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { optimizer.step(); }), "is complex"));
  const auto add = [&](auto options) {
    return message_of<c10::ValueError>([&] {
      optimizer.add_param_group(OptimizerParamGroup(
          {torch::randn({4, 4}).set_requires_grad(true)},
          std::make_unique<decltype(options)>(options)));
    });
  };
  EXPECT_TRUE(contains(add(torch::optim::AdamWOptions(1)), "options of another optimizer"));
  EXPECT_TRUE(contains(add(MuonOptions().betas({1.5, 2})), "a beta is 1.5"));
  EXPECT_EQ(optimizer.param_groups().size(), 1);
  static_cast<MuonOptions&>(optimizer.param_groups()[0].options()).blocks(0);
  EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { optimizer.step(); }), "blocks is 0"));
}

} // namespace
} // namespace fsdp
