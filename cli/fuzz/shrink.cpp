#include "cli/fuzz/shrink.h"

namespace fsdp::cli::fuzz {

namespace {

class Simpler {
 public:
  explicit Simpler(const Case& c) : case_(c) {
    ranks_and_steps();
    blocks();
    for (size_t i = 0; i < case_.groups.size(); ++i) {
      groups(i);
    }
    for (size_t i = 0; i < case_.steps.size(); ++i) {
      step(i);
    }
    reset(&Case::optimizer);
    reset(&Case::optimizer_first);
    reset(&Case::dtype);
    if (case_.dim > 2) {
      add([](Case& c) { c.dim = 2; });
    }
  }
  std::vector<Case> take() {
    return std::move(result_);
  }

 private:
  template <class F>
  void add(F change) {
    auto changed = case_;
    change(changed);
    tidy(changed);
    if (changed != case_) {
      result_.push_back(std::move(changed));
    }
  }
  template <class T>
  void reset(T Case::* member) {
    const auto fresh = Case();
    add([&](Case& c) { c.*member = fresh.*member; });
  }

  void ranks_and_steps() {
    for (int ranks = 1; ranks < case_.ranks; ++ranks) {
      add([&](Case& c) { c.ranks = ranks; });
    }
    for (size_t i = 0; case_.steps.size() > 1 && i < case_.steps.size(); ++i) {
      add([&](Case& c) { c.steps.erase(c.steps.begin() + static_cast<std::ptrdiff_t>(i)); });
    }
  }

  /// Finds the block around block `number`, and its index there.
  static std::pair<Block*, size_t> find(Block& around, int number, int& at) {
    for (size_t i = 0; i < around.blocks.size(); ++i) {
      if (at++ == number) {
        return {&around, i};
      }
      if (const auto found = find(around.blocks[i], number, at); found.first) {
        return found;
      }
    }
    return {nullptr, 0};
  }
  template <class F>
  void change_block(int number, F change) {
    add([&](Case& c) {
      int at = 1;
      const auto [around, index] = find(c.root, number, at);
      change(*around, index);
    });
  }
  template <class T>
  void reset_block(int number, T Block::* member) {
    change_block(number, [&](Block& around, size_t index) {
      around.blocks[index].*member = Block{}.*member;
    });
  }

  static void erase_block(Block& around, size_t index) {
    around.blocks.erase(around.blocks.begin() + static_cast<std::ptrdiff_t>(index));
    for (auto& block : around.blocks) {
      const auto tied = static_cast<int>(index);
      block.tied = block.tied == tied ? -1 : block.tied > tied ? block.tied - 1 : block.tied;
    }
  }

  void blocks() {
    const int count = count_blocks(case_.root);
    for (int i = 1; i < count; ++i) {
      change_block(i, erase_block);
    }
    for (int i = 1; i < count; ++i) {
      // A container is replaced by what is inside.
      change_block(i, [](Block& around, size_t index) {
        const auto inside = around.blocks[index].blocks;
        if (!inside.empty()) {
          erase_block(around, index);
          for (auto block : inside) {
            block.tied = -1;
            around.blocks.push_back(block);
          }
        }
      });
      change_block(
          i, [](Block& around, size_t index) { around.blocks[index].group = around.group; });
      change_block(i, [](Block& around, size_t index) {
        if (!is_container(around.blocks[index].kind)) {
          around.blocks[index].kind = Kind::Linear;
        }
      });
      reset_block(i, &Block::skip);
      reset_block(i, &Block::recomputed);
      reset_block(i, &Block::tied);
      reset_block(i, &Block::frozen);
      reset_block(i, &Block::bias);
      reset_block(i, &Block::size);
    }
    add([](Case& c) { c.root.bias = false; });
    add([](Case& c) { c.root.size = 1; });
  }

  template <class T>
  void reset_group(size_t index, T Group::* member) {
    add([&](Case& c) { c.groups[index].*member = Group{}.*member; });
  }
  void groups(size_t i) {
    add([&](Case& c) { c.groups[i] = {}; });
    reset_group(i, &Group::mesh);
    reset_group(i, &Group::reshard);
    reset_group(i, &Group::param_dtype);
    reset_group(i, &Group::reduce_dtype);
    reset_group(i, &Group::output_dtype);
    reset_group(i, &Group::cast_inputs);
    reset_group(i, &Group::dim);
    reset_group(i, &Group::offload);
    reset_group(i, &Group::min_shard_numel);
    reset_group(i, &Group::reduce_unused);
    reset_group(i, &Group::forward_prefetch);
    reset_group(i, &Group::backward_prefetch);
  }

  template <class T>
  void reset_step(size_t index, T Step::* member) {
    add([&](Case& c) { c.steps[index].*member = Step{}.*member; });
  }
  void step(size_t i) {
    add([&](Case& c) { c.steps[i] = {}; });
    reset_step(i, &Step::events);
    for (size_t event = 0; event < case_.steps[i].events.size(); ++event) {
      add([&](Case& c) {
        auto& events = c.steps[i].events;
        events.erase(events.begin() + static_cast<std::ptrdiff_t>(event));
      });
    }
    if (case_.steps[i].microbatches > 1) {
      add([&](Case& c) { --c.steps[i].microbatches; });
    }
    reset_step(i, &Step::sync);
    reset_step(i, &Step::keep);
    reset_step(i, &Step::mark_last);
    reset_step(i, &Step::calls);
    reset_step(i, &Step::throws_in_forward);
    reset_step(i, &Step::throws_in_backward);
    reset_step(i, &Step::rows);
    reset_step(i, &Step::input_grad);
    reset_step(i, &Step::clip);
    reset_step(i, &Step::update);
    reset_step(i, &Step::zero);
  }

  const Case& case_;
  std::vector<Case> result_;
};

} // namespace

std::vector<Case> simpler_cases(const Case& c) {
  return Simpler(c).take();
}

Case shrink(Case c, const std::function<bool(const Case&)>& fails, int max_calls) {
  size_t at = 0;    // the next candidate
  size_t tried = 0; // candidates since the last success
  auto candidates = simpler_cases(c);
  while (tried < candidates.size() && max_calls-- > 0) {
    at = at < candidates.size() ? at : 0;
    if (fails(candidates[at])) {
      c = candidates[at];
      candidates = simpler_cases(c);
      tried = 0;
    } else {
      ++at;
      ++tried;
    }
  }
  return c;
}

} // namespace fsdp::cli::fuzz
