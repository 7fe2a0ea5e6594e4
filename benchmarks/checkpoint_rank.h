#pragma once

#include <malloc.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <fsdp/fsdp.h>

#include <chrono>
#include <fstream>
#include <future>
#include <iostream>
#include <string>
#include <vector>

namespace bench {

inline constexpr int64_t kWidth = 1024;
inline constexpr int64_t kSmall = 16; // elements of a small tensor

/// What one command took. For several ranks: the maximum of each value.
struct Measured {
  double seconds = 0; // until the call returned
  double total = 0;   // until the checkpoint was complete
  double extra = 0;   // bytes of memory beyond those before the command; negative: unknown
  double beside = 0;  // time of compute during an async save / its time without a save
};

// dcp_checkpoint.py has the same model: change both.

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : up(register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", torch::nn::Linear(4 * kWidth, kWidth))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    return down(torch::relu(up(x)));
  }

  torch::nn::Linear up, down;
};
FSDP_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(int64_t num_blocks) {
    for (int64_t i = 0; i < num_blocks; ++i) { // the whole model is never in memory
      auto block = register_module("block" + std::to_string(i), Block());
      fsdp::fully_shard(block);
      blocks.push_back(block);
    }
  }

  std::vector<Block> blocks;
};
TORCH_MODULE(Model);

/// A field of /proc/self/status, in bytes.
inline double memory(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) {
      return std::stod(line.substr(field.size() + 1)) * 1024;
    }
  }
  return -1;
}

/// Resets VmHWM to the memory that is resident now. Returns false if the kernel cannot.
inline bool reset_peak() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;
  return file.good();
}

class Rank {
 public:
  /// `tensors`: so many small ones instead of the model's.
  Rank(int64_t blocks, int64_t tensors)
      : model_(blocks), state_(fsdp::get_model_state_dict(model_)) {
    const auto mesh = fsdp::init_device_mesh(at::kCPU, {fsdp::get_world_size()});
    for (int64_t i = 0; i < tensors; ++i) {
      const auto whole = torch::full({kSmall}, i % 100);
      state_.insert(
          "layers." + std::to_string(i) + ".weight",
          fsdp::distribute_tensor(whole.to(torch::kFloat), mesh, {fsdp::Shard{0}}));
    }
    compute(); // allocates its memory before anything is measured
    malloc_trim(0);
    model_bytes_ = memory("VmRSS");
  }

  int64_t shard_bytes() const {
    int64_t bytes = 0;
    for (const auto& shard : shards()) {
      bytes += static_cast<int64_t>(shard.nbytes());
    }
    return bytes;
  }

  Measured run(const std::string& command, const std::string& path) {
    const auto expected = checksum();
    if (command == "load") {
      for (auto& shard : shards()) {
        shard.zero_();
      }
    }
    const auto alone = command == "async" ? compute_for(0.5) : 1;
    malloc_trim(0);
    fsdp::default_group().barrier();
    const auto before = command == "async" ? model_bytes_ : memory("VmRSS");
    const bool is_known = reset_peak();
    const auto start = std::chrono::steady_clock::now();
    const auto seconds = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    Measured measured;
    if (command == "save") {
      fsdp::save(state_, path);
    } else if (command == "load") {
      fsdp::load(state_, path);
    } else {
      auto future = fsdp::async_save(state_, path);
      measured.seconds = seconds();
      measured.beside = compute_until(future) / alone;
      future.get();
    }
    measured.total = seconds();
    measured.seconds = command == "async" ? measured.seconds : measured.total;
    measured.extra = is_known ? memory("VmHWM") - before : -1;
    TORCH_CHECK(checksum() == expected, command, " changed the tensors");
    return measured;
  }

  static int work(
      int rank, int ranks, const std::string& rendezvous, int64_t blocks, int64_t tensors) {
    const torch::NoGradGuard no_grad;
    torch::set_num_threads(1);
    fsdp::init_process_group(
        {.backend = "gloo",
         .init_method = "file://" + rendezvous,
         .rank = rank,
         .world_size = ranks});
    {
      Rank self(blocks, tensors);
      std::cout << "ready " TORCH_VERSION " " << self.shard_bytes() << std::endl;
      for (std::string command, path;
           std::cin >> command >> std::ws && std::getline(std::cin, path);) {
        const auto measured = self.run(command, path);
        std::cout << measured.seconds << " " << measured.total << " "
                  << static_cast<int64_t>(measured.extra) << " " << measured.beside << std::endl;
      }
    }
    fsdp::destroy_process_group();
    return 0;
  }

 private:
  /// Keeps one core busy for some milliseconds.
  void compute() {
    torch::mm_out(product_, factors_, factors_);
  }

  /// Repeats `compute` as long as `goes_on(seconds so far)`. Returns the mean seconds
  /// of one `compute`.
  template <class F>
  double compute_while(F goes_on) {
    const auto start = std::chrono::steady_clock::now();
    int64_t count = 0;
    double seconds = 0;
    do {
      compute();
      ++count;
      seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    } while (goes_on(seconds));
    return seconds / static_cast<double>(count);
  }
  double compute_for(double most) {
    return compute_while([&](double seconds) { return seconds < most; });
  }
  double compute_until(const std::future<void>& future) {
    return compute_while([&](double) {
      return future.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
    });
  }

  std::vector<torch::Tensor> shards() const {
    std::vector<torch::Tensor> found;
    for (const auto& [key, value] : state_) {
      found.push_back(std::get<fsdp::DTensor>(value).to_local().detach());
    }
    return found;
  }

  double checksum() const {
    double sum = 0;
    for (const auto& shard : shards()) {
      sum += shard.sum(torch::kDouble).item<double>();
    }
    return sum;
  }

  Model model_;
  fsdp::StateDict state_; // the model's shards themselves, not copies
  torch::Tensor factors_ = torch::ones({kWidth / 2, kWidth / 2});
  torch::Tensor product_ = torch::zeros_like(factors_);
  double model_bytes_ = 0;
};

} // namespace bench
