// Draws cases. Numbers come from mt19937_64 and a remainder, which are the same everywhere.
#include <initializer_list>
#include <random>

#include "cli/fuzz/case.h"

namespace fsdp::cli::fuzz {

namespace {

class Dice {
 public:
  explicit Dice(uint64_t seed) : generator_(seed) {}
  /// From `low` to `high`, both included.
  int64_t number(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(generator_() % static_cast<uint64_t>(high - low + 1));
  }
  int index(size_t size) {
    return static_cast<int>(number(0, static_cast<int64_t>(size) - 1));
  }
  bool chance(int percent) {
    return number(0, 99) < percent;
  }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[index(values.size())];
  }

 private:
  std::mt19937_64 generator_;
};

class Draw {
 public:
  explicit Draw(uint64_t seed) : dice_(seed * 0x9E3779B97F4A7C15ULL + 1) {
    case_.seed = seed;
  }

  Case draw() {
    case_.ranks = static_cast<int>(dice_.one_of({1, 2, 2, 2, 3, 3, 4, 4}));
    case_.dim = dice_.number(1, 8);
    case_.dtype = dice_.chance(60) ? c10::kDouble : c10::kFloat;
    mixed_ = dice_.chance(30);
    plain_mesh_ = dice_.chance(60);
    case_.groups = {group()};
    fill(case_.root, 0, static_cast<int>(dice_.number(1, 5)));
    case_.root.bias = dice_.chance(30);
    case_.root.size = dice_.chance(10) ? 2 : 1;
    for (auto& each : case_.groups) {
      prefetch(each.forward_prefetch);
      prefetch(each.backward_prefetch);
    }
    case_.optimizer = static_cast<Optimizer>(dice_.number(0, 4));
    case_.optimizer_first = dice_.chance(20);
    case_.steps.clear();
    for (auto left = dice_.number(1, 4); left > 0; --left) {
      case_.steps.push_back(step());
    }
    if (dice_.chance(25)) {
      leave_to_python(case_);
    }
    tidy(case_);
    return case_;
  }

 private:
  void fill(Block& container, int depth, int count) {
    const int shared = dice_.chance(25) ? new_group() : -1; // of several modules
    for (int i = 0; i < count; ++i) {
      container.blocks.push_back(block(container, depth, i, shared));
    }
  }

  Block block(const Block& around, int depth, int index, int shared) {
    Block result;
    const bool leaf = depth >= 2 || dice_.chance(70);
    result.kind = leaf ? dice_.one_of(
                             {Kind::Linear, Kind::Linear, Kind::Linear, Kind::Mlp, Kind::Norm,
                              Kind::Table, Kind::Scale})
                       : dice_.one_of({Kind::Chain, Kind::Branches});
    result.bias = dice_.chance(leaf ? 60 : 30);
    result.size = result.kind == Kind::Mlp     ? dice_.number(1, 9)
                  : result.kind == Kind::Table ? dice_.number(1, 5)
                  : result.kind == Kind::Scale ? dice_.number(1, 3)
                  : dice_.chance(15)           ? 2
                                               : 1;
    result.frozen = dice_.chance(12);
    result.recomputed = dice_.chance(20);
    result.keeps_matmuls = result.recomputed && dice_.chance(50);
    result.skip = dice_.chance(80)   ? Skip::Never
                  : dice_.chance(60) ? Skip::OddSteps
                                     : Skip::OddRanks;
    result.group = shared > 0 && dice_.chance(50) ? shared
                   : dice_.chance(45)             ? new_group()
                                                  : around.group;
    result.tied = index > 0 && dice_.chance(20) ? dice_.index(index) : -1;
    if (!leaf) {
      fill(result, depth + 1, static_cast<int>(dice_.number(1, 3)));
    }
    return result;
  }

  int new_group() {
    case_.groups.push_back(group());
    return static_cast<int>(case_.groups.size()) - 1;
  }

  Group group() {
    Group result;
    if (!plain_mesh_) {
      result.mesh = dice_.one_of({Mesh::Shard, Mesh::Hsdp, Mesh::Hsdp, Mesh::Replicate});
    }
    result.reshard = static_cast<int>(dice_.one_of({-1, -1, 0, 1, 1, 2, 3, 4}));
    if (mixed_ && dice_.chance(80)) {
      using Dtype = std::optional<c10::ScalarType>;
      const Dtype none;
      result.param_dtype = dice_.one_of<Dtype>({none, c10::kFloat, c10::kBFloat16});
      result.reduce_dtype = dice_.one_of<Dtype>({none, none, c10::kFloat, case_.dtype});
      result.output_dtype = dice_.one_of<Dtype>({none, none, c10::kFloat, case_.dtype});
      result.cast_inputs = dice_.chance(80);
    }
    result.dim = dice_.chance(25) ? 1 : 0;
    result.offload = dice_.chance(8);
    result.min_shard_numel = dice_.chance(10) ? dice_.number(1, 20) : 0;
    result.reduce_unused = dice_.chance(15);
    return result;
  }

  void prefetch(std::vector<int>& list) {
    if (dice_.chance(20)) {
      for (auto left = dice_.number(1, 3); left > 0; --left) {
        list.push_back(dice_.index(case_.groups.size()));
      }
    }
  }

  Step step() {
    Step result;
    const int num_blocks = count_blocks(case_.root);
    result.microbatches = dice_.chance(60) ? 1 : static_cast<int>(dice_.number(2, 3));
    result.sync = dice_.one_of({Sync::Each, Sync::Last, Sync::Last, Sync::LastOverReplicas});
    result.keep = dice_.chance(40);
    result.mark_last = dice_.chance(40);
    result.calls = dice_.chance(75) ? Calls::One : static_cast<Calls>(dice_.number(1, 3));
    if (dice_.chance(12)) {
      result.throws_in_forward = dice_.index(num_blocks);
    }
    if (dice_.chance(8)) {
      result.throws_in_backward = dice_.index(num_blocks);
    }
    result.rows = dice_.number(1, 3);
    result.input_grad = dice_.chance(30);
    result.clip = dice_.chance(20);
    result.update = dice_.chance(90);
    result.zero = dice_.one_of({Zero::ToNone, Zero::ToNone, Zero::ToZeros, Zero::Never});
    for (auto left = dice_.chance(50) ? 0 : dice_.number(1, 3); left > 0; --left) {
      const auto action = static_cast<Action>(dice_.number(0, static_cast<int>(Action::Thaw)));
      const bool block = is_of_block(action);
      result.events.push_back(
          {.action = action,
           .target = block ? dice_.index(num_blocks) : dice_.index(case_.groups.size()),
           .microbatch = static_cast<int>(dice_.number(0, result.microbatches - 1)),
           .value = dice_.chance(50)});
    }
    return result;
  }

  Dice dice_;
  Case case_;
  bool mixed_ = false;
  bool plain_mesh_ = true;
};

} // namespace

Case draw_case(uint64_t seed) {
  return Draw(seed).draw();
}

} // namespace fsdp::cli::fuzz
