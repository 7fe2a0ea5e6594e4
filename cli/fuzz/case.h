#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::cli::fuzz {

// A case says how a model is made, sharded and trained. It is plain data, so that it can be made
// smaller and printed as a program. Every value that a member may have is legal, once `tidy` has
// made the members fit each other.

enum class Kind : std::uint8_t { Linear, Mlp, Norm, Table, Scale, Chain, Branches };
enum class Skip : std::uint8_t { Never, OddSteps, OddRanks };

/// A module. Its input and output have `Case::dim` columns.
struct Block {
  Kind kind = Kind::Linear;
  int64_t size = 1; // Mlp: of the inside; Table, Scale: rows; Chain: how often it runs its blocks
  bool bias = false;
  bool frozen = false;
  bool recomputed = false;
  bool keeps_matmuls = false; // and so does not recompute them
  Skip skip = Skip::Never;    // when the block around it does not call it
  int group = 0;              // in Case::groups; by default that of the block around it
  int tied = -1;              // the neighbour whose weight it shares; both are Linear
  std::vector<Block> blocks = {};

  bool operator==(const Block&) const = default;
};

enum class Mesh : std::uint8_t { Shard, Hsdp, Replicate };

/// The options of one call of fully_shard.
struct Group {
  Mesh mesh = Mesh::Shard;
  int reshard = -1; // -1: by default, 0: false, 1: true, more: a number of ranks
  std::optional<c10::ScalarType> param_dtype = {};
  std::optional<c10::ScalarType> reduce_dtype = {};
  std::optional<c10::ScalarType> output_dtype = {};
  bool cast_inputs = true;
  int dim = 0; // along which matrices are sharded
  bool offload = false;
  int64_t min_shard_numel = 0;
  bool reduce_unused = false;
  std::vector<int> forward_prefetch = {};
  std::vector<int> backward_prefetch = {};

  bool operator==(const Group&) const = default;
  bool has_policy() const {
    return param_dtype || reduce_dtype || output_dtype || !cast_inputs;
  }
};

enum class Action : std::uint8_t {
  Evaluate,       // a forward without gradients
  Abandon,        // a forward without its backward
  Unshard,        // of a group
  UnshardAsync,   // of a group; nobody waits
  UnshardReshard, // of a group, whose whole values are looked at
  Reshard,        // of a group
  ShardedState,   // is saved, and loaded after an edit
  FullState,      // is compared
  EditShards,     // through to_local()
  EditParameters, // through the parameters
  EditData,       // through their data()
  CallAround,     // the hooks of a block, which must throw
  WriteWhole,     // to parameters of a group, which must throw
  SetReshard,     // of a group, to `value`
  Thaw,           // freezes or unfreezes a block, by `value`
};

/// True if the target is the number of a block, not a group.
bool is_of_block(Action action);

/// Happens before a microbatch.
struct Event {
  Action action = Action::Evaluate;
  int target = 0; // a group, or the number of a block
  int microbatch = 0;
  bool value = false;

  bool operator==(const Event&) const = default;
};

enum class Calls : std::uint8_t { One, SumOfTwo, TwoInOrder, TwoReversed };
enum class Sync : std::uint8_t { Each, Last, LastOverReplicas };
enum class Zero : std::uint8_t { ToNone, ToZeros, Never };

struct Step {
  std::vector<Event> events = {};
  int microbatches = 1;
  Sync sync = Sync::Each;
  bool keep = false;      // set_reshard_after_backward(false) before the last microbatch
  bool mark_last = false; // set_is_last_backward(false) before the last microbatch
  Calls calls = Calls::One;
  int throws_in_forward = -1;  // the block that throws, before the step
  int throws_in_backward = -1; // the same
  int64_t rows = 2;
  bool input_grad = false;
  bool clip = false;
  bool update = true; // of the parameters
  Zero zero = Zero::ToNone;

  bool operator==(const Step&) const = default;
};

enum class Optimizer : std::uint8_t { Sgd, Adam, AdamW, FsdpSgd, FsdpAdamW };

struct Case {
  uint64_t seed = 0; // of values
  int ranks = 2;
  int64_t dim = 4;
  c10::ScalarType dtype = c10::kDouble;
  Block root = {.kind = Kind::Chain};
  std::vector<Group> groups = {{}}; // the first one is the root's
  Optimizer optimizer = Optimizer::Sgd;
  bool optimizer_first = false; // made before the model is sharded
  std::vector<Step> steps = {{}};
  double tamper = 1; // multiplies a gradient, so that a test can see that it is noticed

  bool operator==(const Case&) const = default;
};

/// Draws a case. The same seed gives the same case.
Case draw_case(uint64_t seed);

/// Makes the members fit each other: names no group or block that does not exist, and leaves out
/// what the library's documentation forbids.
void tidy(Case& c);

/// Takes out of a case what Python's FSDP2 does not have or cannot do.
void leave_to_python(Case& c);

/// Calls `f` with every block from the outside in, and its number.
void for_each_block(const Block& root, const std::function<void(const Block&, int number)>& f);
int count_blocks(const Block& root);
/// True for modules that call others.
bool is_container(Kind kind);

/// The seeds of the values of a parameter and of a batch. fsdp2.py has the same.
int64_t parameter_seed(const Case& c, int index);
int64_t batch_seed(const Case& c, int step, int microbatch, int call, int rank);

/// The difference that rounding may explain, relative to the size of a tensor.
double tolerance(const Case& c);

} // namespace fsdp::cli::fuzz
