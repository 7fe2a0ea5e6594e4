// Fine-tunes a model from a Hugging Face style folder of safetensors files. The
// program makes such a folder first; a downloaded one is loaded in the same way.
// Only the head is trained: frozen weights are sharded and gathered, but have no
// gradients.
#include <fsdp/fsdp.h>
#include <stdlib.h>

#include <iostream>
#include <vector>

struct ModelImpl : torch::nn::Module {
  ModelImpl()
      : body(register_module("body", fsdp::nn::Linear(8, 16))),
        head(register_module("head", fsdp::nn::Linear(16, 1))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return head(torch::tanh(body(x)));
  }
  fsdp::nn::Linear body, head;
};
FSDP_MODULE(Model);

// The files have the name "model.encoder.*" for the parameters "body.*".
const std::vector<fsdp::NameRule> kNames{{"body\\.(.*)", "model.encoder.$1"}};

void make_pretrained(const std::string& folder) {
  fsdp::run_ranks(1, [&](int) {
    Model model;
    fsdp::save_hf(fsdp::get_model_state_dict(model), folder, {.names = kNames});
  });
}

int main() {
  char temporary[] = "/tmp/fsdp-example-XXXXXX";
  TORCH_CHECK(mkdtemp(temporary));
  const std::string folder = temporary;
  make_pretrained(folder + "/pretrained");
  fsdp::run_ranks(4, [&](int rank) {
    Model model{nullptr};
    {
      const fsdp::MetaInit on_meta;
      model = Model();
    }
    for (auto& param : model->body->parameters()) {
      param.set_requires_grad(false);
    }
    const auto mesh = fsdp::init_device_mesh(torch::kCPU, {4});
    fsdp::fully_shard(model->body, {.mesh = mesh});
    fsdp::fully_shard(model, {.mesh = mesh});
    fsdp::to_empty(model, torch::kCPU);
    auto state = fsdp::get_model_state_dict(model);
    fsdp::load(state, folder + "/pretrained", {.names = kNames}); // each rank reads its own part

    fsdp::optim::AdamW optimizer(model->head->parameters(), 1e-2);
    const auto x = torch::linspace(-1, 1, 64).view({8, 8}).roll(rank, 1);
    double first = 0, last = 0;
    for (int step = 0; step < 30; ++step) {
      auto loss = (model(x) - 1).pow(2).mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      last = loss.item<double>();
      first = step == 0 ? last : first;
    }
    TORCH_CHECK(last < first, "rank ", rank, " did not learn: ", first, " -> ", last);
    fsdp::save_hf(
        fsdp::get_model_state_dict(model), folder + "/tuned",
        {.names = kNames, .dtype = torch::kBFloat16});
    if (rank == 0) {
      std::cout << "loss " << first << " -> " << last << "\n";
    }
  });
  TORCH_CHECK(system(("rm -r " + folder).c_str()) == 0);
}
