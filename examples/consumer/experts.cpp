// A mixture of experts with expert parallelism, trained next to the same model on one rank: losses
// and parameters are equal. The ranks of the axis "expert" divide the experts among them, and send
// each other the rows that their experts are to compute. The ranks of "shard" have the same
// experts, which fully_shard divides. All other parameters are sharded over all ranks.
#include <ATen/CPUGeneratorImpl.h>
#include <fsdp/fsdp.h>

#include <cmath>
#include <iostream>

constexpr int kRanks = 4;
constexpr int64_t kExperts = 8;
constexpr int64_t kChosen = 2; // experts for each row
constexpr int64_t kDim = 16;
constexpr int64_t kHidden = 32;
constexpr int64_t kRows = 24; // of each rank

/// How many rows this rank sends to each rank of a group, and receives from each.
struct Exchange : torch::CustomClassHolder {
  fsdp::ProcessGroup group;
  std::vector<int64_t> sent;
  std::vector<int64_t> received;

  torch::Tensor run(const torch::Tensor& rows, bool back) const {
    const auto& to = back ? received : sent;
    const auto& from = back ? sent : received;
    const auto out = rows.new_empty({c10::sum_integers(from), rows.size(1)});
    group.all_to_all(out, rows.contiguous(), from, to);
    return out;
  }
};

/// Sends rows. Its backward sends their gradients the other way.
struct ExchangeRows : torch::autograd::Function<ExchangeRows> {
  static torch::Tensor forward(
      torch::autograd::AutogradContext* context,
      const torch::Tensor& rows,
      const c10::intrusive_ptr<Exchange>& exchange,
      bool back) {
    context->saved_data["exchange"] = c10::IValue::make_capsule(exchange);
    context->saved_data["back"] = back;
    return exchange->run(rows, back);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list grads) {
    const auto exchange = context->saved_data["exchange"].toCapsule();
    const bool back = context->saved_data["back"].toBool();
    return {static_cast<Exchange&>(*exchange).run(grads[0], !back), {}, {}};
  }
};

struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl()
      : up(register_parameter("up", torch::empty({kExperts, kDim, kHidden}))),
        down(register_parameter("down", torch::empty({kExperts, kHidden, kDim}))) {}

  /// `ends` says where the rows of each expert end.
  torch::Tensor forward(const torch::Tensor& rows, const torch::Tensor& ends) {
    return at::_grouped_mm(torch::silu(at::_grouped_mm(rows, up, ends)), down, ends);
  }

  torch::Tensor up, down;
};
FSDP_MODULE(Experts);

struct MixtureImpl : torch::nn::Module {
  MixtureImpl()
      : router(register_module(
            "router", torch::nn::Linear(torch::nn::LinearOptions(kDim, kExperts).bias(false)))),
        experts(register_module("experts", Experts())) {}

  torch::Tensor forward(const torch::Tensor& x) {
    const auto [weights, choices] = torch::softmax(router(x), -1).topk(kChosen);
    const auto chosen = choices.flatten();
    const auto by_expert = chosen.argsort(/*stable=*/true, 0, /*descending=*/false);
    const auto rows = by_expert.div(kChosen, "floor");
    const auto results = compute(x.index_select(0, rows), chosen.bincount({}, kExperts));
    const auto weighted = results * weights.flatten().index_select(0, by_expert).unsqueeze(1);
    return x.index_add(0, rows, weighted);
  }

  torch::nn::Linear router;
  Experts experts;
  fsdp::ProcessGroup group; // over which the experts are divided, if they are

 private:
  /// `rows` are ordered by expert. Expert i computes `counts[i]` of them.
  torch::Tensor compute(const torch::Tensor& rows, const torch::Tensor& counts) {
    if (!group.defined()) {
      return experts(rows, ends(counts));
    }
    const auto received = torch::empty_like(counts); // by rank, and then by expert
    group.all_to_all(received, counts);
    const auto exchange = c10::make_intrusive<Exchange>();
    exchange->group = group;
    exchange->sent = by_rank(counts);
    exchange->received = by_rank(received);
    // They arrive by rank and then by expert, and the experts want them by expert.
    const auto local = torch::arange(kExperts / group.size()).repeat(group.size());
    const auto by_expert = local.repeat_interleave(received).argsort(/*stable=*/true, 0, false);
    const auto arrived = ExchangeRows::apply(rows, exchange, /*back=*/false);
    const auto results =
        experts(arrived.index_select(0, by_expert), ends(received.view({group.size(), -1}).sum(0)));
    const auto as_arrived = results.index_select(0, by_expert.argsort());
    return ExchangeRows::apply(as_arrived, exchange, /*back=*/true);
  }

  std::vector<int64_t> by_rank(const torch::Tensor& counts) const {
    const auto sums = counts.view({group.size(), -1}).sum(1);
    return {sums.data_ptr<int64_t>(), sums.data_ptr<int64_t>() + sums.numel()};
  }
  static torch::Tensor ends(const torch::Tensor& counts) {
    return counts.cumsum(0).to(torch::kInt);
  }
};
FSDP_MODULE(Mixture);

struct NetImpl : torch::nn::Module {
  NetImpl() : head(register_module("head", torch::nn::Linear(kDim, 1))) {
    for (int i = 0; i < 2; ++i) {
      mixtures.push_back(register_module("mixture" + std::to_string(i), Mixture()));
    }
    fsdp::init_parameters(
        *this, [](const std::string&, torch::Tensor& param) { param.normal_(0, 0.3); }, /*seed=*/1);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& mixture : mixtures) {
      x = mixture(x);
    }
    return head(x);
  }
  std::vector<Mixture> mixtures;
  torch::nn::Linear head;
};
FSDP_MODULE(Net);

void shard(Net& net) {
  const auto mesh = fsdp::init_device_mesh(torch::kCPU, {2, 2}, {"shard", "expert"});
  for (auto& mixture : net->mixtures) {
    mixture->group = mesh.get_group("expert");
    for (const auto* name : {"up", "down"}) {
      fsdp::distribute_parameter(mixture->experts, name, mesh["expert"], {fsdp::Shard{0}});
    }
    // Ranks divide the rows of their experts, however few these are. An expert's gradient adds up
    // over the rows of all ranks, but would be divided by the number of ranks of "shard" only.
    const auto by_rows = [](const std::string&, const torch::Tensor&) {
      return fsdp::BlockShard{2};
    };
    fsdp::fully_shard(mixture->experts, {.mesh = mesh["shard"], .shard_placement_fn = by_rows})
        .set_gradient_divide_factor(kRanks);
    fsdp::fully_shard(mixture);
  }
  fsdp::fully_shard(net);
}

int main() {
  fsdp::run_ranks(kRanks, [](int rank) {
    Net net, whole;
    shard(net);
    fsdp::optim::AdamW optimizer(net->parameters(), 1e-2);
    torch::optim::AdamW reference(whole->parameters(), 1e-2);
    for (int step = 0; step < 10; ++step) {
      const auto generator = at::make_generator<at::CPUGeneratorImpl>(step);
      const auto batch = torch::randn({kRows * kRanks, kDim}, generator);
      const auto loss_of = [](Net& model, const torch::Tensor& x) {
        return (model(x) - x.sin().sum(1, /*keepdim=*/true)).pow(2).mean();
      };
      auto loss = loss_of(net, batch.narrow(0, kRows * rank, kRows));
      loss.backward();
      const auto norm = fsdp::clip_grad_norm_(net->parameters(), 1.0);
      optimizer.step();
      optimizer.zero_grad();

      auto expected = loss_of(whole, batch);
      expected.backward();
      const auto expected_norm = torch::nn::utils::clip_grad_norm_(whole->parameters(), 1.0);
      reference.step();
      reference.zero_grad();

      auto mean = loss.detach();
      fsdp::default_group().all_reduce(mean, fsdp::ReduceOp::Avg);
      TORCH_CHECK(torch::allclose(mean, expected, 1e-5), mean.item(), " is not ", expected.item());
      TORCH_CHECK(std::abs(norm.item<double>() / expected_norm - 1) < 1e-4); // of the gradients
      if (rank == 0) {
        std::cout << "step " << step << ": loss " << mean.item<float>() << "\n";
      }
    }
    const auto parameters = net->named_parameters();
    for (const auto& item : whole->named_parameters()) {
      const auto gathered = fsdp::as_dtensor(parameters[item.key()]).full_tensor();
      TORCH_CHECK(torch::allclose(gathered, item.value(), 1e-4, 1e-5), item.key());
    }
    if (rank == 0) {
      std::cout << fsdp::as_dtensor(parameters["mixture0.experts.up"]).str() << "\n";
    }
  });
}
