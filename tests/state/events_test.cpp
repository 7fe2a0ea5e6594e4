// In which order groups are gathered, freed and reduced: the sequences of FSDP2's
// own tests, line by line.
#include "state/order_fixture.h"

namespace fsdp {
namespace {

using namespace test;

/// Checkpointing changes nothing here.
void run_flavours(int ranks, const std::function<void(Flavour)>& body) {
  for (const auto& [flavour, name] : kFlavours) {
    run_ranks(ranks, [&, &flavour = flavour, &name = name](int) {
      SCOPED_TRACE(name);
      body(flavour);
    });
  }
}

// ------------------------------------------------------------ Order

TEST(Events, OneForwardAndOneBackward) {
  run_flavours(4, [](Flavour flavour) {
    for (const auto& [reshard, name] : kReshards) {
      SCOPED_TRACE(name);
      auto net = make_transformer(3, reshard, /*weight_tying=*/true, flavour);
      torch::optim::Adam optimizer(unique_parameters(*net), 1e-2);
      Lines backward{"U layers.2 b", "U layers.1 b", "P layers.2", "U layers.0 b",
                     "P layers.1",   "P layers.0",   "P -"};
      if (name == "true" || name == "2") {
        backward.insert(backward.begin(), "U - b");
      } else if (name == "false") {
        backward = {"P layers.2", "P layers.1", "P layers.0", "P -"};
      }
      for (int step = 0; step < 3; ++step) {
        EventLog log;
        auto loss = loss_of(net, step);
        EXPECT_EQ(
            short_form(log, "UP"),
            (Lines{"U - f", "U layers.0 f", "U layers.1 f", "U layers.2 f"}));
        log.clear();
        loss.backward();
        EXPECT_EQ(short_form(log, "UP"), backward);
        optimizer.step();
        optimizer.zero_grad();
      }
    }
  });
}

TEST(Events, TwoForwardsThenOneBackward) {
  run_flavours(4, [](Flavour flavour) {
    const Lines forward{"U - f", "U layers.0 f", "U layers.1 f", "U layers.2 f"};
    const Lines layers{"U layers.2 b", "U layers.1 b", "P layers.2",
                       "U layers.0 b", "P layers.1",   "P layers.0"};
    for (const auto& [reshard, name] : kReshards) {
      SCOPED_TRACE(name);
      auto net = make_transformer(3, reshard, /*weight_tying=*/true, flavour);
      Lines forwards = forward;
      Lines backward;
      if (name == "false") {
        backward = {"P layers.2", "P layers.1", "P layers.0"};
      } else {
        forwards.insert(forwards.end(), forward.begin() + (name == "auto"), forward.end());
        backward = layers;
        if (name != "auto") {
          backward.insert(backward.begin(), "U - b");
        }
      }
      backward.insert(backward.end(), layers.begin(), layers.end());
      backward.push_back("P -");
      for (int step = 0; step < 2; ++step) {
        EventLog log;
        auto loss = loss_of(net, step) + loss_of(net, step + 10);
        EXPECT_EQ(short_form(log, "UP"), forwards);
        log.clear();
        loss.backward();
        EXPECT_EQ(short_form(log, "UP"), backward);
      }
    }
  });
}

struct TwoPartsImpl : torch::nn::Module {
  TwoPartsImpl()
      : first(register_module("0", linear(8, 8))), second(register_module("1", DoubleLinear(8))) {}
  std::vector<torch::Tensor> forward(const torch::Tensor& x) {
    return second(first(x));
  }
  Linear first;
  DoubleLinear second;
};
FSDP_MODULE(TwoParts);

TEST(Events, AModuleThatOneOfTwoBackwardsDoesNotUse) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<TwoParts>();
    fully_shard(net->first);
    fully_shard(net->second->lin1, {.reshard_after_forward = true});
    fully_shard(net->second->lin2, {.reshard_after_forward = true});
    auto root = fully_shard(net, {.reshard_after_forward = true});
    for (int step = 0; step < 2; ++step) {
      EventLog log;
      const auto outputs = net(random_batch(step, {4, 8}));
      EXPECT_EQ(short_form(log, "UP"), (Lines{"U 0 f", "U 1.lin1 f", "U 1.lin2 f"}));
      log.clear();
      root.set_is_last_backward(false);
      outputs[1].sum().backward({}, /*retain_graph=*/true);
      EXPECT_EQ(
          short_form(log, "UP"),
          (Lines{"U 1.lin2 b", "U 1.lin1 b", "P 1.lin2", "U 0 b", "P 0", "P 1.lin1"}));
      log.clear();
      root.set_is_last_backward(true);
      outputs[0].sum().backward();
      EXPECT_EQ(short_form(log, "UP"), (Lines{"U 0 b", "P 1.lin1", "P 0", "P 1.lin2"}));
      const auto expected = reference(random_batch(step, {4, 8}));
      (expected[0].sum() + expected[1].sum()).backward();
    }
    average_gradients(*reference);
    expect_parity(*net, *reference);
  });
}

const Lines kDefaultBackward{"U - b",        "U layers.3 b", "U layers.2 b", "R layers.3 p",
                             "P layers.3",   "U layers.1 b", "R layers.2 p", "P layers.2",
                             "U layers.0 b", "R layers.1 p", "P layers.1",   "R layers.0 p",
                             "P layers.0",   "R - p",        "P -"};

TEST(Events, ForwardPrefetchLists) {
  run_flavours(4, [](Flavour flavour) {
    auto net = make_transformer(4, true, /*weight_tying=*/true, flavour);
    const auto set = [&](size_t ahead) {
      for (size_t i = 0; i + ahead < net->blocks.size(); ++i) {
        std::vector<FSDPModule> next;
        for (size_t k = 1; k <= ahead; ++k) {
          next.push_back(FSDPModule::of(net->blocks[i + k]));
        }
        FSDPModule::of(net->blocks[i]).set_modules_to_forward_prefetch(next);
      }
    };
    const auto check = [&](const Lines& forward) {
      EventLog log;
      auto loss = loss_of(net);
      EXPECT_EQ(short_form(log), forward);
      log.clear();
      loss.backward();
      EXPECT_EQ(short_form(log), kDefaultBackward);
    };
    set(1);
    check(
        {"U - f", "U layers.0 f", "U layers.1 f", "R layers.0 f", "U layers.2 f", "R layers.1 f",
         "U layers.3 f", "R layers.2 f", "R layers.3 f", "R - f"});
    set(2);
    check(
        {"U - f", "U layers.0 f", "U layers.1 f", "U layers.2 f", "R layers.0 f", "U layers.3 f",
         "R layers.1 f", "R layers.2 f", "R layers.3 f", "R - f"});
  });
}

TEST(Events, BackwardPrefetchLists) {
  run_flavours(4, [](Flavour flavour) {
    auto net = make_transformer(4, true, /*weight_tying=*/true, flavour);
    const auto set = [&](size_t ahead) {
      for (size_t i = ahead; i < net->blocks.size(); ++i) {
        std::vector<FSDPModule> next;
        for (size_t k = 1; k <= ahead; ++k) {
          next.push_back(FSDPModule::of(net->blocks[i - k]));
        }
        FSDPModule::of(net->blocks[i]).set_modules_to_backward_prefetch(next);
      }
    };
    const auto check = [&](const Lines& backward) {
      EventLog log;
      auto loss = loss_of(net);
      EXPECT_EQ(
          short_form(log),
          (Lines{
              "U - f", "U layers.0 f", "R layers.0 f", "U layers.1 f", "R layers.1 f",
              "U layers.2 f", "R layers.2 f", "U layers.3 f", "R layers.3 f", "R - f"}));
      log.clear();
      loss.backward();
      EXPECT_EQ(short_form(log), backward);
    };
    set(1);
    check(kDefaultBackward);
    set(2);
    check(
        {"U - b", "U layers.3 b", "U layers.2 b", "U layers.1 b", "R layers.3 p", "P layers.3",
         "U layers.0 b", "R layers.2 p", "P layers.2", "R layers.1 p", "P layers.1", "R layers.0 p",
         "P layers.0", "R - p", "P -"});
  });
}

TEST(Events, GroupsOfSeveralModules) {
  run_flavours(2, [](Flavour flavour) {
    ModelArgs args{.n_layers = 5, .dropout_p = 0, .weight_tying = false};
    auto reference = seeded<Transformer>(args);
    args.checkpoint_activations = flavour == Flavour::AtTheCall;
    auto net = seeded<Transformer>(args);
    auto& blocks = net->blocks;
    for (auto& block : blocks) {
      if (flavour == Flavour::ForGood) {
        apply_activation_checkpointing(block);
      }
    }
    fully_shard(blocks[0]);
    fully_shard({blocks[1], blocks[2]});
    fully_shard(std::vector<TransformerBlock>{blocks[3], blocks[4]}); // any range
    fully_shard({net->tok_embeddings, net->pos_embeddings});
    fully_shard({net->norm, net->output}, {.reshard_after_forward = false});
    fully_shard(net);
    const Lines forward{
        "U tok_embeddings, pos_embeddings f", "U layers.0 f", "U layers.1, layers.2 f",
        "U layers.3, layers.4 f", "U norm, output f"};
    const Lines backward{
        "U layers.3, layers.4 b",
        "P norm, output",
        "U layers.1, layers.2 b",
        "P layers.3, layers.4",
        "U layers.0 b",
        "P layers.1, layers.2",
        "U tok_embeddings, pos_embeddings b",
        "P layers.0",
        "P tok_embeddings, pos_embeddings"};
    for (int step = 0; step < 3; ++step) {
      EventLog log;
      auto loss = loss_of(net, step);
      EXPECT_EQ(short_form(log, "UP"), forward);
      log.clear();
      loss.backward();
      EXPECT_EQ(short_form(log, "UP"), backward);
    }
    net->zero_grad();
    train_and_compare(
        net, reference, [](Transformer& each, int step) { return loss_of(each, step); });
  });
}

struct HalfUsedImpl : torch::nn::Module {
  HalfUsedImpl()
      : unused_lin(register_module("unused_lin", linear(1, 1))),
        lin(register_module("lin", linear(16, 16))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::relu(lin(x));
  }
  Linear unused_lin, lin;
};
FSDP_MODULE(HalfUsed);

struct HalvesImpl : torch::nn::Module {
  HalvesImpl()
      : first(register_module("0", HalfUsed())),
        second(register_module("1", HalfUsed())),
        last(register_module("2", linear(16, 16))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return last(second(first(x)));
  }
  HalfUsed first, second;
  Linear last;
};
FSDP_MODULE(Halves);

TEST(Events, AGroupWhoseModulesDoNotAllRun) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Halves>();
    for (auto* half : {&net->first, &net->second}) {
      fully_shard({(*half)->unused_lin, (*half)->lin}, {.reshard_after_forward = true});
    }
    fully_shard(net);
    const auto loss_of = [](Halves& each, int step) {
      return each(random_batch(step, {2, 16})).sum();
    };
    for (int step = 0; step < 3; ++step) {
      EventLog log;
      auto loss = loss_of(net, step);
      EXPECT_EQ(
          short_form(log, "UP"),
          (Lines{"U - f", "U 0.unused_lin, 0.lin f", "U 1.unused_lin, 1.lin f"}));
      log.clear();
      loss.backward();
      EXPECT_EQ(
          short_form(log, "UP"), (Lines{
                                     "U 1.unused_lin, 1.lin b", "U 0.unused_lin, 0.lin b",
                                     "P 1.unused_lin, 1.lin", "P -", "P 0.unused_lin, 0.lin"}));
    }
    net->zero_grad();
    train_and_compare(net, reference, loss_of);
  });
}

TEST(Events, AWrongPrefetchIsDropped) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<MLP>(16);
    auto in_proj = fully_shard(net->in_proj);
    auto out_proj = fully_shard(net->out_proj);
    fully_shard(net);
    in_proj.set_modules_to_backward_prefetch({out_proj}); // has been through backward
    train_and_compare(net, reference, [](MLP& each, int step) {
      return each(random_batch(step, {4, 16})).sum();
    });
    EXPECT_FALSE(out_proj.is_unsharded());
  });
}

} // namespace
} // namespace fsdp
