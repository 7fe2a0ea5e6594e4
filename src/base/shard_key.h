#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fsdp::detail {

/// The dispatch key of parameters that show their shards. See Note [Guarded shards].
constexpr auto kShardKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// While this object lives, the calling thread may do anything with shards.
class UnguardedShards {
  c10::impl::ExcludeDispatchKeyGuard exclude_{kShardKey};
};

} // namespace fsdp::detail
