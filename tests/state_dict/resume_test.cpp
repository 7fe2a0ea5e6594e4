// Model and optimizer through files, from any number of ranks and mesh to any other.
#include <fsdp/checkpoint.h>
#include <fsdp/optim.h>

#include <map>

#include "checkpoint/state_dicts.h"
#include "support/processes.h"

namespace fsdp {
namespace {

using namespace test;

constexpr int64_t kDim = 17; // divides by nothing

/// Sizes of (replicate, shard, tp).
struct Layout {
  int64_t replicate = 1, shard = 1, tp = 1;
  int ranks() const {
    return static_cast<int>(replicate * shard * tp);
  }
  std::string name() const {
    return c10::str(replicate, "x", shard, "x", tp);
  }
};

const std::vector<Layout> kLayouts{{1, 1, 1}, {1, 2, 1}, {1, 3, 1}, {1, 4, 1},
                                   {1, 8, 1}, {2, 2, 1}, {1, 2, 2}, {2, 2, 2}};

struct Training {
  Training(const Layout& layout, uint64_t seed) : net(nullptr) {
    {
      std::lock_guard lock(default_generator_mutex);
      torch::manual_seed(seed);
      net = MLPStack(kDim);
    }
    net->to(torch::kDouble);
    const auto mesh = init_device_mesh(
        test_device(), {layout.replicate, layout.shard, layout.tp}, {"replicate", "shard", "tp"});
    if (layout.tp > 1) {
      parallelize(net, mesh["tp"]);
    }
    const auto dp = layout.replicate > 1 ? mesh[{"replicate", "shard"}] : mesh["shard"];
    for (auto& mlp : net->mlps) {
      fully_shard(mlp, {.mesh = dp});
    }
    fully_shard(net, {.mesh = dp});
    optimizer = std::make_unique<optim::AdamW>(
        net->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  }

  /// The same data on every rank, so that the number of ranks does not matter.
  double step(int number) {
    optimizer->zero_grad();
    auto loss = net(tp_batch(number, {4, kDim})).pow(2).mean();
    loss.backward();
    optimizer->step();
    return loss.item<double>();
  }

  StateDict state(const StateDictOptions& options = {}) {
    StateDict state;
    state.insert_all(get_model_state_dict(net, options), "model.");
    state.insert_all(get_optimizer_state_dict(net, *optimizer, options), "optim.");
    return state;
  }

  MLPStack net;
  std::unique_ptr<optim::AdamW> optimizer;
};

/// On rank 0; elsewhere nothing.
void expect_same_wholes(const StateDict& actual, const StateDict& expected) {
  ASSERT_EQ(actual.keys(), expected.keys());
  for (const auto& [key, value] : expected) {
    if (const auto* tensor = std::get_if<torch::Tensor>(&value)) {
      EXPECT_SAME(std::get<torch::Tensor>(actual.at(key)), *tensor) << key;
    } else {
      EXPECT_EQ(actual.at(key).index(), value.index()) << key;
    }
  }
}

TEST(Resume, FromAnyLayoutToAnyOtherBitForBit) {
  const auto folder = temporary_folder();
  std::map<std::string, StateDict> saved; // whole, of rank 0
  std::map<std::string, double> next_loss;
  for (const auto& from : kLayouts) {
    run_ranks(from.ranks(), [&](int rank) {
      SCOPED_TRACE(from.name());
      Training training(from, 1);
      training.step(0);
      training.step(1);
      save(training.state(), folder + "/" + from.name());
      auto whole = training.state(kFull);
      const auto loss = training.step(2);
      if (rank == 0) {
        saved[from.name()] = std::move(whole);
        next_loss[from.name()] = loss;
      }
    });
  }
  for (const auto& to : kLayouts) {
    run_ranks(to.ranks(), [&](int rank) {
      for (const auto& from : kLayouts) {
        SCOPED_TRACE(from.name() + " -> " + to.name());
        Training training(to, 2); // other values
        auto state = training.state();
        load(state, folder + "/" + from.name());
        set_optimizer_state_dict(training.net, *training.optimizer, state.below("optim."));
        const auto whole = training.state(kFull);
        if (rank == 0) {
          expect_same_wholes(whole, saved.at(from.name()));
        }
        const auto expected = next_loss.at(from.name());
        // Other layouts add in another order.
        const bool is_same = from.name() == to.name();
        EXPECT_NEAR(training.step(2), expected, is_same ? 0 : 1e-9 * std::abs(expected));
      }
    });
  }
}

} // namespace
} // namespace fsdp
