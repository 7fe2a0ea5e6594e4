// Values for a model, whole or sharded.
#include <atomic>
#include <thread>

#include "module/meta_fixture.h"

namespace fsdp {
namespace {

using namespace test;

TEST(InitParameters, GivesTheSameValuesAtEveryWorldSize) {
  auto reference = seeded<Transformer>(ModelArgs{.vocab_size = 7, .dim = 12});
  init_parameters(reference, fill_randomly, 5);
  for (const int n : {1, 2, 3, 4}) {
    run_ranks(n, [&](int) {
      auto net = on_meta<Transformer>(ModelArgs{.vocab_size = 7, .dim = 12});
      shard_transformer(net);
      to_empty(net, torch::kCPU);
      init_parameters(net, fill_randomly, 5);
      const auto whole = reference->named_parameters();
      for (const auto& item : named_dtensors(net)) {
        EXPECT_SAME(item.value().full_tensor(), whole[item.key()].detach());
      }
    });
  }
}

TEST(InitParameters, OfBlocksOfRows) {
  auto reference = seeded<MLP>(5);
  init_parameters(reference, fill_randomly, 5);
  for (const int n : {1, 2, 3, 4}) {
    run_ranks(n, [&](int) {
      auto net = on_meta<MLP>(5);
      fully_shard(net, {.shard_placement_fn = [](const auto&, const torch::Tensor& param) {
                    return BlockShard{param.dim()};
                  }});
      to_empty(net);
      init_parameters(net, fill_randomly, 5);
      expect_parity(*net, *reference, 0);
    });
  }
}

TEST(InitParameters, WorksOnWhatHasValues) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<TwoMLPs>(6);
    fully_shard(net->first, {.shard_placement_fn = [](const std::string&, const torch::Tensor& p) {
                  return Shard{p.dim() - 1};
                }});
    fully_shard(net, {.ignored_params = {net->second->in_proj->weight}});
    const auto loss_of = [](TwoMLPs& each, int step) {
      return each(random_batch(step, {2, 6})).sum();
    };
    // An ignored parameter is not reduced: the same batch for all.
    auto loss = net(torch::ones({2, 6})).sum();
    loss.backward();
    net->zero_grad();
    init_parameters(net, fill_randomly, 3);
    init_parameters(reference, fill_randomly, 3);
    expect_parity(*net, *reference, 0);
    torch::NoGradGuard no_grad;
    EXPECT_TRUE(near(loss_of(net, 0), loss_of(reference, 0), 1e-6));
  });
}

TEST(InitParameters, DependsOnTheSeedAndTheName) {
  const auto weights = [](uint64_t seed) {
    auto net = on_meta<TwoMLPs>(6);
    to_empty(net, torch::kCPU);
    std::vector<std::string> names;
    init_parameters(
        net,
        [&](const std::string& name, torch::Tensor& param) {
          EXPECT_FALSE(param.requires_grad());
          names.push_back(name);
          fill_randomly(name, param);
        },
        seed);
    EXPECT_EQ(names, net->named_parameters().keys());
    return std::vector{net->first->in_proj->weight.detach(), net->second->in_proj->weight.detach()};
  };
  const auto first = weights(1), second = weights(2);
  EXPECT_SAME(weights(1)[1], first[1]);
  EXPECT_FALSE(first[0].equal(first[1]));
  EXPECT_FALSE(first[0].equal(second[0]));
  // Runs of other days and builds can be repeated.
  auto one = linear(2, 2, false);
  init_parameters(one, [](const std::string&, torch::Tensor& param) { param.uniform_(); });
  EXPECT_SAME(
      one->weight.detach(), torch::empty({2, 2}).uniform_(0, 1, generator(0xa3ebf547f4f9fbfe)));
}

TEST(InitParameters, FillsATiedWeightOnceByItsFirstName) {
  auto net = seeded<Transformer>();
  std::vector<std::string> names;
  init_parameters(net, [&](const std::string& name, torch::Tensor&) { names.push_back(name); });
  EXPECT_EQ(names.size(), unique_parameters(*net).size());
  EXPECT_EQ(std::count(names.begin(), names.end(), "tok_embeddings.weight"), 1);
  EXPECT_EQ(std::count(names.begin(), names.end(), "output.weight"), 0);
}

/// Every way to draw that has no generator of its own.
std::vector<std::pair<std::string, std::function<torch::Tensor()>>> draws() {
  namespace init = torch::nn::init;
  const auto x = [] { return torch::full({6, 8}, 0.5); };
  return {
      {"randn", [] { return torch::randn({20}); }},
      {"rand", [] { return torch::rand({20}); }},
      {"at::randn", [] { return at::randn({20}); }},
      {"randint", [] { return torch::randint(5, 99, {20}); }},
      {"randperm", [] { return torch::randperm(20); }},
      {"normal", [] { return torch::normal(0.0, 1.0, {20}); }},
      {"randn_like", [=] { return torch::randn_like(x()); }},
      {"rand_like", [=] { return torch::rand_like(x()); }},
      {"randint_like", [=] { return torch::randint_like(x(), 99); }},
      {"randn_out",
       [=] {
         auto out = x();
         return torch::randn_out(out, {6, 8});
       }},
      {"normal_", [=] { return x().normal_(); }},
      {"uniform_", [=] { return x().uniform_(); }},
      {"random_", [=] { return x().random_(0, 99); }},
      {"exponential_", [=] { return x().exponential_(); }},
      {"log_normal_", [=] { return x().log_normal_(); }},
      {"truncated", [=] { return x().uniform_(-0.9, 0.9).erfinv_().clamp_(-2, 2); }},
      {"bernoulli", [=] { return torch::bernoulli(x()); }},
      {"bernoulli_", [=] { return x().bernoulli_(0.5); }},
      {"multinomial", [=] { return torch::multinomial(x(), 3); }},
      {"dropout", [=] { return torch::dropout(x(), 0.5, true); }},
      {"alpha_dropout", [=] { return torch::alpha_dropout(x(), 0.5, true); }},
      {"feature_dropout", [=] { return torch::feature_dropout(x(), 0.5, true); }},
      {"rrelu", [=] { return torch::rrelu(-x(), 0.1, 0.3, true); }},
      {"attention",
       [] {
         const auto q = torch::ones({1, 2, 4, 8});
         return torch::scaled_dot_product_attention(q, q, torch::randn_like(q), {}, 0.5);
       }},
      {"kaiming_uniform_", [=] { return init::kaiming_uniform_(x()); }},
      {"kaiming_normal_", [=] { return init::kaiming_normal_(x()); }},
      {"xavier_uniform_", [=] { return init::xavier_uniform_(x()); }},
      {"xavier_normal_", [=] { return init::xavier_normal_(x()); }},
      {"orthogonal_", [=] { return init::orthogonal_(x()); }},
      {"sparse_", [=] { return init::sparse_(x(), 0.5); }},
      {"a module", [] { return torch::nn::Linear(4, 4)->weight.detach(); }},
      {"with autograd", [=] {
         const torch::AutoGradMode grad(true);
         return torch::dropout(x().set_requires_grad(true) * 2, 0.5, true).detach();
       }}};
}

TEST(InitParameters, DrawsWithoutTheDefaultGenerator) {
  auto one = linear(1, 1, false);
  for (const auto& [name, draw] : draws()) {
    SCOPED_TRACE(name);
    const auto state = default_generator_state();
    const auto drawn = [&, &draw = draw](uint64_t seed) {
      torch::Tensor result;
      init_parameters(one, [&](const std::string&, torch::Tensor&) { result = draw(); }, seed);
      return result;
    };
    const auto first = drawn(1);
    EXPECT_SAME(drawn(1), first);
    EXPECT_FALSE(drawn(2).equal(first));
    EXPECT_SAME(default_generator_state(), state);
  }
  // One that was named is used.
  torch::Tensor named;
  init_parameters(
      one, [&](const std::string&, torch::Tensor&) { named = torch::randn({9}, generator(4)); });
  EXPECT_SAME(named, torch::randn({9}, generator(4)));
}

TEST(InitParameters, ThreadsDoNotDisturbEachOther) {
  std::atomic<bool> stop = false;
  std::thread noise([&] {
    while (!stop) {
      torch::randn({64});
    }
  });
  auto reference = seeded<Stack>(32);
  init_parameters(reference, fill_randomly, 8);
  run_ranks(4, [&](int) {
    auto net = on_meta<Stack>(32);
    fully_shard(net);
    to_empty(net, torch::kCPU);
    init_parameters(net, fill_randomly, 8);
    const auto whole = reference->named_parameters();
    for (const auto& item : net->named_parameters()) {
      EXPECT_SAME(item.value().detach(), part_of(whole[item.key()].detach(), item.value()));
    }
  });
  stop = true;
  noise.join();
}

TEST(InitParameters, Refuses) {
  run_ranks(2, [](int) {
    auto net = on_meta<TwoMLPs>(4);
    shard(net);
    const auto message = [&](const auto& fill) {
      return message_of<c10::ValueError>([&] { init_parameters(net, fill); });
    };
    to_empty(net->first, torch::kCPU);
    EXPECT_TRUE(contains(
        message(fill_randomly),
        "on the meta device: 1.in_proj.weight, 1.in_proj.bias, "
        "1.out_proj.weight, 1.out_proj.bias; call to_empty first"));
    to_empty(net, torch::kCPU);
    EXPECT_TRUE(contains(message(nullptr), "needs a function"));
    EXPECT_TRUE(contains(
        message([](const std::string&, torch::Tensor& param) { param = torch::ones({3}); }),
        "'0.in_proj.weight' of sizes [16, 4]"));
    init_parameters( // another tensor of the right sizes will do
        net, [](const std::string&, torch::Tensor& param) { param = torch::ones(param.sizes()); });
    EXPECT_SAME(net->first->out_proj->bias.detach(), torch::ones({2}));
    FSDPModule::of(net->first).unshard();
    EXPECT_TRUE(contains(message(fill_randomly), "'0.in_proj.weight' is unsharded; reshard()"));
    FSDPModule::of(net->first).reshard();
    EXPECT_THROW(
        init_parameters(
            net, [](const std::string&, torch::Tensor&) { throw std::logic_error("mine"); }),
        std::logic_error);
    init_parameters(net, fill_randomly);
    torch::NoGradGuard no_grad;
    net->first->buffer.zero_();
    EXPECT_TRUE(net(torch::ones({1, 4})).isfinite().all().item<bool>());
  });
}

} // namespace
} // namespace fsdp
