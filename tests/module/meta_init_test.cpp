// Models that are built without memory, sharded, and given memory afterwards.
#include <fsdp/nn.h>

#include <thread>

#include "module/meta_fixture.h"

namespace fsdp {
namespace {

using namespace test;

std::vector<torch::Tensor> tensors_of(const torch::nn::Module& module) {
  auto tensors = module.parameters();
  const auto buffers = module.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  return tensors;
}

void expect_device(const torch::nn::Module& module, torch::Device device) {
  for (const auto& tensor : tensors_of(module)) {
    EXPECT_EQ(tensor.device(), device);
  }
}

// ------------------------------------------------------------ MetaInit

TEST(MetaInit, ReachesWhatNamesNoDevice) {
  float memory[] = {1, 2};
  {
    const MetaInit meta;
    for (const auto& tensor :
         {torch::empty({2}), torch::zeros({2}), torch::ones({2}, torch::kDouble),
          torch::full({2}, 3), torch::arange(4), torch::linspace(0, 1, 5), torch::eye(3),
          torch::randn({2}), torch::randint(9, {2}), torch::scalar_tensor(1), torch::tensor(3),
          torch::empty_strided({2, 2}, {1, 2}), torch::ones({3, 3}).triu(1),
          torch::zeros({2}, torch::TensorOptions().pinned_memory(true))}) {
      EXPECT_TRUE(tensor.is_meta());
    }
    const auto here = torch::from_blob(memory, {2});
    for (const auto& tensor :
         {here, torch::ones({2}, torch::kCPU), torch::empty({2}, here.options()),
          torch::tensor({1, 2}), torch::tensor(std::vector<int64_t>{1, 2}), here * 2,
          torch::zeros_like(here), here.new_zeros({3}), torch::randn_like(here)}) {
      EXPECT_TRUE(tensor.is_cpu());
    }
    const auto leaf = torch::zeros({2}, torch::requires_grad());
    EXPECT_TRUE(leaf.is_meta() && leaf.requires_grad() && leaf.is_leaf());
    {
      const MetaInit again;
    }
    EXPECT_TRUE(torch::empty({2}).is_meta());
    std::thread([] { EXPECT_TRUE(torch::empty({2}).is_cpu()); }).join();
  }
  EXPECT_TRUE(torch::empty({2}).is_cpu());
  EXPECT_THROW(
      {
        const MetaInit meta;
        torch::ones({2}).sum().item<float>();
      },
      c10::Error);
  EXPECT_TRUE(torch::empty({2}).is_cpu());
}

TEST(MetaInit, BuildsTorchsModules) {
  const auto state = default_generator_state();
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  {
    const MetaInit meta;
    modules = {
        nn::Linear(4, 4).ptr(),
        nn::Embedding(nn::EmbeddingOptions(4, 4).padding_idx(1)).ptr(),
        nn::EmbeddingBag(4, 4).ptr(),
        nn::LayerNorm(nn::LayerNormOptions({4})).ptr(),
        nn::RMSNorm(4).ptr(),
        nn::GroupNorm(2, 4).ptr(),
        nn::BatchNorm2d(4).ptr(),
        nn::Conv2d(nn::Conv2dOptions(4, 8, 3)).ptr(),
        nn::ConvTranspose1d(nn::ConvTranspose1dOptions(2, 2, 3)).ptr(),
        nn::MultiheadAttention(nn::MultiheadAttentionOptions(8, 2).add_bias_kv(true)).ptr(),
        nn::LSTM(nn::LSTMOptions(4, 8).num_layers(2)).ptr(),
        nn::Transformer(nn::TransformerOptions(8, 2, 1, 1)).ptr(), // clones its layers
        nn::PReLU().ptr(),
        Transformer().ptr()};
  }
  for (const auto& module : modules) {
    SCOPED_TRACE(module->name());
    EXPECT_FALSE(module->parameters().empty());
    expect_device(*module, torch::kMeta);
  }
  EXPECT_EQ(modules[6]->buffers().size(), 3u); // of BatchNorm
  EXPECT_SAME(default_generator_state(), state);
}

TEST(MetaInit, LeavesCollectivesAlone) {
  run_ranks(2, [](int rank) {
    const MetaInit meta;
    auto sum = torch::full({2}, rank + 1, torch::device(torch::kCPU).dtype(torch::kFloat));
    default_group().all_reduce(sum);
    EXPECT_SAME(sum, torch::tensor({3.0f, 3.0f}));
    const auto mesh = init_device_mesh(torch::kCPU, {2});
    const auto spread =
        distribute_tensor(torch::tensor({1.0f, 2.0f}), mesh, {Shard{0}}).full_tensor();
    EXPECT_SAME(spread, torch::tensor({1.0f, 2.0f}));
  });
}

// ------------------------------------------------------------ to_empty

struct MixedImpl : torch::nn::Module {
  MixedImpl()
      : a(register_module("a", linear(4, 4))),
        b(register_module("b", linear(4, 4))),
        here(register_parameter("here", torch::ones({4}, torch::kCPU), /*requires_grad=*/false)),
        frozen(register_parameter("frozen", torch::ones({4}), /*requires_grad=*/false)),
        turned(register_buffer("turned", torch::empty_strided({2, 3}, {1, 2}))),
        counts(register_buffer("counts", torch::zeros({4}, torch::kLong))) {
    register_buffer("none", torch::Tensor());
    register_module("again", a);
    tie_weights(b, a);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return b(a(x)) * here * frozen + counts + turned.sum();
  }
  Linear a, b;
  torch::Tensor here, frozen, turned, counts;
};
FSDP_MODULE(Mixed);

TEST(ToEmpty, HappensInPlaceAndOnce) {
  auto net = on_meta<Mixed>();
  const auto held = net->a->weight;
  held.sum().backward(); // a trial on meta leaves nothing behind
  to_empty(net, torch::kCPU);
  expect_device(*net, torch::kCPU);
  EXPECT_TRUE(held.is_cpu() && held.requires_grad() && held.is_leaf());
  EXPECT_FALSE(held.grad().defined());
  EXPECT_TRUE(net->b->weight.is_same(net->a->weight));
  EXPECT_FALSE(net->frozen.requires_grad());
  EXPECT_EQ(net->turned.strides(), (std::vector<int64_t>{1, 2}));
  EXPECT_SAME(net->here.detach(), torch::ones({4}));
  const auto* memory = held.data_ptr();
  to_empty(net, torch::kCPU);
  EXPECT_EQ(held.data_ptr(), memory);
  {
    torch::NoGradGuard no_grad;
    held.fill_(2);
  }
  (held * 3).sum().backward();
  EXPECT_SAME(held.grad(), torch::full({4, 4}, 3.0f));
  EXPECT_TRUE(
      contains(message_of<c10::ValueError>([&] { to_empty(net, torch::kMeta); }), "has no memory"));
}

TEST(ToEmpty, GivesShardsOnly) {
  for (const int n : {1, 2, 3, 4}) {
    run_ranks(n, [&](int rank) {
      auto net = on_meta<TwoMLPs>(5);
      shard(net);
      expect_device(*net, torch::kMeta);
      to_empty(net, torch::kCPU);
      expect_device(*net, torch::kCPU);
      const int64_t rows = (20 + n - 1) / n;
      const auto begin = std::min<int64_t>(20, rows * rank);
      const auto length = std::min<int64_t>(20 - begin, rows);
      const auto& weight = net->first->in_proj->weight;
      EXPECT_EQ(weight.sizes(), (std::vector<int64_t>{length, 5}));
      EXPECT_EQ(static_cast<int64_t>(weight.storage().nbytes()), length * 5 * 4);
      EXPECT_EQ(as_dtensor(weight).sizes(), (std::vector<int64_t>{20, 5}));
    });
  }
}

// ------------------------------------------------------------ What nobody has filled

TEST(Unfilled, IsNamedUntilItIsFilled) {
  run_ranks(2, [](int) {
    auto net = on_meta<Mixed>();
    auto reference = seeded<Mixed>();
    fully_shard(net, {.ignored_params = {net->here}});
    to_empty(net, torch::kCPU);
    const auto refused = [&](const std::string& names) {
      for (int attempt = 0; attempt < 2; ++attempt) {
        const auto message = message_of<c10::Error>([&] { net(torch::ones({1, 4})); });
        EXPECT_TRUE(contains(message, "since to_empty: " + names + "; fill parameters by"));
      }
    };
    refused("frozen, a.weight, a.bias, b.bias, turned, counts");
    torch::NoGradGuard no_grad;
    net->turned.zero_();
    reference->turned.zero_();
    refused("frozen, a.weight, a.bias, b.bias, counts");
    init_parameters(net, [](const std::string& name, torch::Tensor& param) {
      if (name != "a.bias") {
        fill_randomly(name, param);
      }
    });
    refused("a.bias, counts");
    net->counts.zero_();
    init_parameters(net, fill_randomly);
    init_parameters(reference, fill_randomly);
    const torch::AutoGradMode grad(true);
    train_and_compare(net, reference, [](Mixed& each, int step) {
      return each(random_batch(step, {2, 4})).sum();
    });
  });
}

TEST(Unfilled, AnyWayToWriteCounts) {
  run_ranks(2, [](int) {
    torch::NoGradGuard no_grad;
    auto net = on_meta<Mixed>();
    fully_shard(net, {.ignored_params = {net->here}});
    to_empty(net, torch::kCPU);
    net->counts.fill_(-1);         // the bytes stay, the version moves
    net->turned.data().fill_(0.5); // the version stays
    net->frozen.set_data(part_of(torch::ones({4}), net->frozen).clone());
    as_dtensor(net->a->weight).to_local().fill_(0.5);
    std::fill_n(net->a->bias.data_ptr<float>(), net->a->bias.numel(), 0.5f);
    auto unsharded = FSDPModule::of(net);
    unsharded.unshard(); // what was put there is adopted
    unsharded.reshard();
    const auto message = message_of<c10::Error>([&] { net(torch::ones({1, 4})); });
    EXPECT_TRUE(contains(message, "since to_empty: b.bias; fill"));
    net->b->bias.set_data(torch::ones({4})); // the whole, of which it takes its part
    EXPECT_TRUE(net(torch::ones({1, 4})).isfinite().all().item<bool>());
  });
}

TEST(Unfilled, AndGatheredByHandIsNaN) {
  run_ranks(2, [](int) {
    auto net = on_meta<TwoMLPs>(4);
    shard(net);
    to_empty(net, torch::kCPU);
    FSDPModule::of(net->first).unshard();
    EXPECT_TRUE(net->first->in_proj->weight.isnan().all().item<bool>());
    EXPECT_TRUE(contains(
        message_of<c10::Error>([&] { net(torch::ones({1, 4})); }),
        "since to_empty: 0.in_proj.weight, 0.in_proj.bias, 0.out_proj.weight, 0.out_proj.bias, "
        "1.in_proj.weight, 1.in_proj.bias, 1.out_proj.weight, 1.out_proj.bias, 0.buffer;"));
  });
}

TEST(Unfilled, EmptyShardsAreNot) {
  run_ranks(4, [](int rank) {
    auto net = on_meta<MLP>(1, /*bias=*/false, /*with_buffer=*/false, /*dim_multiplier=*/1);
    fully_shard(net);
    to_empty(net, torch::kCPU);
    torch::NoGradGuard no_grad;
    if (rank == 0) { // the only one that has a row
      net->in_proj->weight.fill_(1);
      net->out_proj->weight.fill_(1);
    }
    EXPECT_SAME(net(torch::ones({1, 1})), torch::ones({1, 1}));
  });
}

TEST(Unfilled, OtherModelsAreNotConcerned) {
  auto waiting = on_meta<TwoMLPs>(4);
  to_empty(waiting, torch::kCPU);
  run_ranks(2, [](int) {
    auto net = seeded<TwoMLPs>(4);
    shard(net);
    net(torch::ones({1, 4})).sum().backward();
  });
}

// ------------------------------------------------------------ FSDP2's own tests

/// to_empty, an optimizer, every module's own reset_parameters, one step.
void expect_usable(TwoMLPs& net, int64_t dim) {
  to_empty(net, torch::kCPU);
  expect_device(*net, torch::kCPU);
  torch::optim::Adam optimizer(net->parameters(), 1e-2);
  const auto locals = [&] {
    std::vector<torch::Tensor> result;
    for (const auto& param : net->parameters()) {
      result.push_back(as_dtensor(param).to_local());
    }
    result.push_back(net->first->buffer);
    return result;
  };
  for (const auto& tensor : locals()) {
    tensor.fill_(1337);
  }
  net->apply([](torch::nn::Module& module) {
    torch::NoGradGuard no_grad;
    if (auto* each = module.as<torch::nn::LinearImpl>()) {
      each->reset_parameters();
    } else if (auto* each = module.as<MLPImpl>()) {
      each->reset_parameters();
    }
  });
  for (const auto& tensor : locals()) {
    EXPECT_TRUE(tensor.numel() == 0 || !tensor.equal(torch::full_like(tensor, 1337)));
  }
  net(random_batch(0, {4, dim})).sum().backward();
  optimizer.step();
  expect_device(*net, torch::kCPU);
}

TEST(MetaDevice, ShardsOneDimension) {
  const MixedPrecisionPolicy low{.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {4});
    for (const int64_t dim : {8, 3, 1}) { // even, uneven, and empty on some ranks
      for (const auto& policy : {MixedPrecisionPolicy{}, low}) {
        SCOPED_TRACE_OF(dim, policy);
        auto net = [&] {
          const MetaInit meta;
          TwoMLPs made(dim, /*bias=*/false, /*dim_multiplier=*/1);
          expect_device(*made, torch::kMeta);
          shard(made, {.mesh = mesh, .mp_policy = policy});
          return made;
        }();
        expect_device(*net, torch::kMeta);
        expect_usable(net, dim);
      }
    }
    auto net = [] {
      const MetaInit meta;
      TwoMLPs made(8);
      shard(made); // makes the default mesh
      return made;
    }();
    expect_usable(net, 8);
  });
}

TEST(MetaDevice, IsRefusedInForwardUntilThereIsMemory) {
  run_ranks(4, [](int) {
    auto net = on_meta<TwoMLPs>(8);
    auto reference = seeded<TwoMLPs>(8);
    shard(net);
    for (int attempt = 0; attempt < 2; ++attempt) {
      EXPECT_TRUE(contains(
          message_of<c10::Error>([&] { net(torch::ones({4, 8})); }),
          "should be materialized from meta device before training, but the following were still "
          "on meta device: ['0.in_proj.weight', '0.in_proj.bias', '0.out_proj.weight', "
          "'0.out_proj.bias'];"));
    }
    to_empty(net, torch::kCPU);
    init_parameters(net, fill_randomly);
    init_parameters(reference, fill_randomly);
    net->first->buffer.copy_(reference->first->buffer);
    train_and_compare(net, reference, [](TwoMLPs& each, int step) {
      return each(random_batch(step, {4, 8})).sum();
    });
  });
}

TEST(MetaDevice, IsRefusedForHalfAGroup) {
  run_ranks(2, [](int) {
    auto net = on_meta<MLP>(4);
    fully_shard(net);
    to_empty(net->in_proj, torch::kCPU);
    init_parameters(net->in_proj, fill_randomly);
    EXPECT_TRUE(contains(
        message_of<c10::Error>([&] { net(torch::ones({1, 4})); }),
        "still on meta device: ['out_proj.weight', 'out_proj.bias'];"));
    to_empty(net, torch::kCPU);
    init_parameters(net, fill_randomly);
    net(torch::ones({1, 4})).sum().backward();
  });
}

TEST(MetaDevice, TransformerTrainsAsWithoutIt) {
  const ModelArgs args{.n_layers = 3, .dropout_p = 0};
  for (const int n : {1, 2, 3}) {
    run_ranks(n, [&](int) {
      auto net = on_meta<Transformer>(args);
      auto reference = seeded<Transformer>(args);
      torch::optim::SGD early(unique_parameters(*net), 1e-2); // holds the tensors as they are
      shard_transformer(net);
      to_empty(net, torch::kCPU);
      init_parameters(net, fill_randomly, 11);
      init_parameters(reference, fill_randomly, 11);
      expect_parity(*net, *reference, 0);
      train_and_compare(net, reference, transformer_loss);
      transformer_loss(net, 9).backward();
      const auto before = net->output->weight.detach().clone();
      early.step();
      EXPECT_FALSE(net->output->weight.detach().equal(before));
    });
  }
}

struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : layer1(register_module("layer1", linear(3, 3, false))),
        layer2(register_module("layer2", linear(3, 3, false))),
        weight_norm(register_parameter("weight_norm", torch::empty({3}))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return layer2(layer1(x)).sum() + weight_norm.sum();
  }
  Linear layer1, layer2;
  torch::Tensor weight_norm;
};
FSDP_MODULE(Normed);

TEST(MetaDevice, AParameterMayBeComputedFromOthers) {
  run_ranks(2, [](int) {
    auto net = on_meta<Normed>();
    fully_shard(net->layer1);
    fully_shard(net->layer2);
    fully_shard(net);
    to_empty(net->layer1, torch::kCPU);
    to_empty(net->layer2, torch::kCPU);
    init_parameters(net->layer1, fill_randomly, 1);
    init_parameters(net->layer2, fill_randomly, 2);
    to_empty(net, torch::kCPU);
    const auto norm = [](const Linear& layer) { return layer->weight.detach().norm(2, 1); };
    net->weight_norm.set_data(norm(net->layer1) + norm(net->layer2)); // a shard, of shards
    net(random_batch(0, {3, 3})).backward();
    EXPECT_SAME(net->weight_norm.grad(), torch::ones_like(net->weight_norm));
    EXPECT_SAME(net->weight_norm.detach(), norm(net->layer1) + norm(net->layer2));
  });
}

TEST(Unfilled, AlsoIfItWasShardedAfterwards) {
  run_ranks(2, [](int) {
    auto net = on_meta<TwoMLPs>(4);
    to_empty(net, torch::kCPU);
    net->first->buffer.fill_(1);
    shard(net);
    const auto message = message_of<c10::Error>([&] { net(torch::ones({2, 4})); });
    EXPECT_TRUE(contains(message, "0.in_proj.weight"));
    EXPECT_FALSE(contains(message, "0.buffer"));
    init_parameters(net, fill_randomly);
    EXPECT_FALSE(net(torch::ones({2, 4})).isnan().any().item<bool>());
  });
}

TEST(Unfilled, AlsoIfItWasCastSince) {
  run_ranks(2, [](int) {
    for (const auto dtype : {torch::kDouble, torch::kBFloat16}) {
      SCOPED_TRACE_OF(dtype);
      auto net = on_meta<TwoMLPs>(4);
      shard(net, {.mesh = init_device_mesh(torch::kCPU, {2})});
      to_empty(net, torch::kCPU);
      init_parameters(net, fill_randomly);
      net->to(dtype);
      EXPECT_TRUE(
          contains(message_of<c10::Error>([&] { net(torch::ones({2, 4}, dtype)); }), "0.buffer"));
      net->first->buffer.fill_(std::numeric_limits<double>::quiet_NaN()); // as the user likes
      net(torch::ones({2, 4}, dtype));
    }
  });
}

TEST(Unfilled, BuffersThatAreStillOnMetaAreNamed) {
  run_ranks(2, [](int) {
    auto net = on_meta<TwoMLPs>(4);
    shard(net, {.mesh = init_device_mesh(torch::kCPU, {2})});
    to_empty(net->second, torch::kCPU);
    to_empty(net->first->in_proj, torch::kCPU);
    to_empty(net->first->out_proj, torch::kCPU);
    init_parameters(net, fill_randomly);
    EXPECT_TRUE(contains(
        message_of<c10::Error>([&] { net(torch::ones({2, 4})); }),
        "still on the meta device: 0.buffer;"));
    to_empty(net, torch::kCPU);
    net->first->buffer.fill_(1);
    net(torch::ones({2, 4}));
  });
}

} // namespace
} // namespace fsdp
