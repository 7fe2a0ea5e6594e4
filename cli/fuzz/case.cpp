#include "cli/fuzz/case.h"

#include <algorithm>
#include <map>

namespace fsdp::cli::fuzz {

namespace {

void visit(const Block& block, int& number, const std::function<void(const Block&, int)>& f) {
  f(block, number++);
  for (const auto& inner : block.blocks) {
    visit(inner, number, f);
  }
}

/// Numbers the groups in the order of their blocks, so that each one has blocks of one container.
class Renumbering {
 public:
  explicit Renumbering(Case& c) : case_(c), old_(c.groups) {}

  void run() {
    old_.resize(std::max<size_t>(1, old_.size()));
    case_.groups = {old_[0]};
    from_ = {0};
    renumber(case_.root, 0, 0);
    for (auto& group : case_.groups) {
      for (auto* list : {&group.forward_prefetch, &group.backward_prefetch}) {
        rename(*list);
      }
    }
  }

 private:
  void renumber(Block& block, int was, int is) {
    block.group = is;
    std::map<int, int> names{{was, is}};
    for (auto& inner : block.blocks) {
      const int before = inner.group;
      if (!names.contains(before)) {
        const bool known = before > 0 && before < static_cast<int>(old_.size());
        names[before] = known ? add(before) : is;
      }
      renumber(inner, before, names[before]);
    }
  }
  int add(int before) {
    case_.groups.push_back(old_[before]);
    from_.push_back(before);
    return static_cast<int>(case_.groups.size()) - 1;
  }
  void rename(std::vector<int>& list) const {
    std::vector<int> renamed;
    for (const int before : list) {
      const auto at = std::find(from_.begin(), from_.end(), before);
      if (at != from_.end()) {
        renamed.push_back(static_cast<int>(at - from_.begin()));
      }
    }
    list = renamed;
  }

  Case& case_;
  std::vector<Group> old_;
  std::vector<int> from_; // the old number of each group
};

// ------------------------------------------------------------ Known bugs
//
// Cases that are known to fail are left out, so that others are found. Remove a function when its
// bug is fixed.

/// As in FSDP2, the backward of a group of several modules begins with the gradient of the last
/// one's output. If they run side by side, that gradient may come late, or never.
void divide_branches(Block& block) {
  std::vector<int> seen;
  for (auto& inner : block.blocks) {
    divide_branches(inner);
    if (block.kind == Kind::Branches && inner.group != block.group) {
      const bool again = std::find(seen.begin(), seen.end(), inner.group) != seen.end();
      seen.push_back(inner.group);
      inner.group = again ? block.group : inner.group;
    }
  }
}

// ------------------------------------------------------------ Rules of the documentation

void tidy_blocks(Case& c, Block& block) {
  for (size_t i = 0; i < block.blocks.size(); ++i) {
    auto& inner = block.blocks[i];
    if (inner.tied >= 0) {
      const auto source = static_cast<size_t>(inner.tied);
      const bool fits = source < i && inner.kind == Kind::Linear &&
                        block.blocks[source].kind == Kind::Linear &&
                        block.blocks[source].group == inner.group && block.blocks[source].tied < 0;
      inner.tied = fits ? inner.tied : -1;
      inner.frozen = fits ? block.blocks[source].frozen : inner.frozen;
    }
    if (inner.skip == Skip::OddRanks) {
      // With several groups, ranks with other graphs may begin their backwards in another order.
      const bool fits = c.groups.size() == 1;
      inner.skip = fits ? inner.skip : Skip::OddSteps;
      c.groups[inner.group].reduce_unused |= fits;
    }
    tidy_blocks(c, inner);
  }
}

void tidy_groups(Case& c) {
  std::vector<int> num_modules(c.groups.size());
  const std::function<void(const Block&)> count = [&](const Block& block) {
    for (const auto& inner : block.blocks) {
      num_modules[inner.group] += inner.group != block.group ? 1 : 0;
      count(inner);
    }
  };
  count(c.root);
  for (size_t i = 0; i < c.groups.size(); ++i) {
    auto& group = c.groups[i];
    if (group.mesh == Mesh::Hsdp && c.ranks % 2 != 0) {
      group.mesh = Mesh::Shard;
    }
    if (group.mesh == Mesh::Replicate && num_modules[i] > 1) {
      group.mesh = Mesh::Shard;
    }
    if (group.mesh == Mesh::Replicate) {
      group.reshard = -1;
      group.dim = 0;
      group.min_shard_numel = 0;
    }
    const int size = group.mesh == Mesh::Hsdp ? 2 : c.ranks;
    if (group.reshard > 1 && size % group.reshard != 0) {
      group.reshard = 1;
    }
  }
}

/// True if parameters must be at rest.
bool needs_rest(Action action) {
  return action == Action::EditParameters || action == Action::EditData ||
         action == Action::CallAround || action == Action::WriteWhole;
}

/// False if the loss of some step may need no gradient.
bool has_always_backward(const Case& c) {
  bool result = true;
  for_each_block(c.root, [&](const Block& block, int) {
    result &= !block.frozen && block.skip == Skip::Never;
  });
  for (const auto& step : c.steps) {
    for (const auto& event : step.events) {
      result &= event.action != Action::Thaw;
    }
  }
  return result;
}

void tidy_steps(Case& c) {
  const int num_blocks = count_blocks(c.root);
  const int num_groups = static_cast<int>(c.groups.size());
  const bool always_backward = has_always_backward(c);
  Zero before = Zero::ToNone;
  for (auto& step : c.steps) {
    std::erase_if(step.events, [&](const Event& event) {
      const bool block = is_of_block(event.action);
      // A parameter that is frozen while it has a gradient that was not reduced keeps it.
      return event.microbatch >= step.microbatches ||
             ((block || event.action == Action::WriteWhole) && event.microbatch > 0) ||
             event.target >= (block ? num_blocks : num_groups) ||
             (event.action == Action::SetReshard && c.groups[event.target].mesh == Mesh::Replicate);
    });
    // Whole parameters must not be written to. They are whole after a forward without a backward.
    const bool shows_wholes =
        std::any_of(step.events.begin(), step.events.end(), [](const Event& event) {
          return event.action == Action::Abandon || event.action == Action::Unshard ||
                 event.action == Action::UnshardAsync;
        });
    std::erase_if(step.events, [&](const Event& event) {
      return needs_rest(event.action) &&
             (shows_wholes || (event.microbatch > 0 && !always_backward));
    });
    if (step.microbatches == 1) {
      step.sync = Sync::Each;
      step.keep = step.mark_last = false;
    }
    step.throws_in_forward = std::min(step.throws_in_forward, num_blocks - 1);
    step.throws_in_backward = std::min(step.throws_in_backward, num_blocks - 1);
    // After a failed backward, nobody knows which reductions reached the gradients.
    if (before != Zero::ToNone || step.sync != Sync::Each || step.keep || step.mark_last) {
      step.throws_in_backward = -1;
    }
    before = step.zero;
  }
}

/// Ranks that run other blocks must still call the same collectives.
void tidy_ranks(Case& c) {
  std::vector<bool> differs; // by the number of the block
  const std::function<void(const Block&, bool)> look = [&](const Block& block, bool inside) {
    inside |= block.skip == Skip::OddRanks;
    differs.push_back(inside);
    for (const auto& inner : block.blocks) {
      look(inner, inside);
    }
  };
  look(c.root, false);
  if (std::find(differs.begin(), differs.end(), true) == differs.end()) {
    return;
  }
  for (auto& step : c.steps) {
    // Otherwise the input of the next block may need a gradient on some ranks only. The backward of
    // that block would then end later there, or there would be none.
    step.input_grad = true;
    for (auto* number : {&step.throws_in_forward, &step.throws_in_backward}) {
      *number = *number >= 0 && differs[*number] ? -1 : *number;
    }
  }
}

} // namespace

void tidy(Case& c) {
  // One change may make another one necessary.
  for (Case before; before != c;) {
    before = c;
    divide_branches(c.root);
    Renumbering(c).run();
    tidy_groups(c);
    tidy_blocks(c, c.root);
    tidy_steps(c);
    tidy_ranks(c);
  }
}

void for_each_block(const Block& root, const std::function<void(const Block&, int number)>& f) {
  int number = 0;
  visit(root, number, f);
}

int count_blocks(const Block& root) {
  int count = 0;
  for_each_block(root, [&](const Block&, int) { ++count; });
  return count;
}

bool is_of_block(Action action) {
  return action == Action::Thaw || action == Action::CallAround;
}

bool is_container(Kind kind) {
  return kind == Kind::Chain || kind == Kind::Branches;
}

int64_t parameter_seed(const Case& c, int index) {
  return static_cast<int64_t>(c.seed % 1000003) * 1000000 + index;
}

int64_t batch_seed(const Case& c, int step, int microbatch, int call, int rank) {
  return parameter_seed(c, 100000 + 1000 * step + 100 * microbatch + 10 * call + rank);
}

double tolerance(const Case& c) {
  double result = c.dtype == c10::kDouble ? 1e-9 : 2e-4;
  for (const auto& group : c.groups) {
    for (const auto& dtype : {group.param_dtype, group.reduce_dtype, group.output_dtype}) {
      if (dtype) {
        result = std::max(
            result, *dtype == c10::kBFloat16 ? 6e-2
                    : *dtype == c10::kFloat  ? 2e-4
                                             : 0);
      }
    }
  }
  return result;
}

} // namespace fsdp::cli::fuzz
