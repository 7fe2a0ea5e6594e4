#pragma once

#include "process_group/store_factory.h"

namespace fsdp::detail {

/// Makes torch's gloo backend. It listens on `spec.address`, or on the interface
/// that GLOO_SOCKET_IFNAME names. Collective over the group.
c10::intrusive_ptr<c10d::Backend> make_gloo(const BackendSpec& spec);

} // namespace fsdp::detail
