#pragma once

#include <cstdint>
#include <string>

namespace fsdp::detail {

// Note [The life of a group]
//
//              unshard                 wait_for_unshard
//   Sharded ---------------> Gathering ------------------> Unsharded ------------> KeptForGraph
//                                ^                          |  |  ^    a backward       |
//                                | unshard in backward      |  |  |    makes a graph    |
//                                |                          |  v  | wait_for_unshard    |
//                             Divided <---------------------+  Kept <-------------------+
//                                      reshard after forward,   |      a backward makes none
//                                      over k ranks             | the last backward ends
//                                                               v
//                                                            Outdated
//
// Every state also goes back to Sharded: by reshard, by an unshard that needs the shards as they
// are now, after an error, and when somebody replaced a shard.
//
//   Sharded       Each rank has its shard.
//   Gathering     An all-gather is under way. The parameters show their shards.
//   Unsharded     The whole parameters are in memory, and the modules see them.
//   KeptForGraph  As Unsharded: the backward that has run made a graph (create_graph), and the
//                 backward of that graph needs the whole parameters. In Python, users see shards
//                 between forwards and backwards, because the gradients belong to the shards.
//   Kept          The whole parameters are in memory, for the next microbatch, and the modules see
//                 shards: backward ended, and reshard_after_backward is off.
//   Outdated      As Kept, but an optimizer may have written to the shards since.
//   Divided       After a forward with reshard_after_forward = k: the whole parameters are divided
//                 over k neighbouring ranks. A gather for backward takes place among these ranks.
enum class ParamsState : std::uint8_t {
  Sharded,
  Gathering,
  Unsharded,
  KeptForGraph,
  Kept,
  Outdated,
  Divided,
};

const char* to_string(ParamsState state);

/// Throws unless the drawing has an arrow between the states.
void check_transition(ParamsState from, ParamsState to, const std::string& group);

} // namespace fsdp::detail
