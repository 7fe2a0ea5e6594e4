#ifndef USE_C10D_GLOO // some torch packages define this already
#define USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "launch/launch_env.h"
#include "process_group/gloo/gloo_backend.h"

namespace fsdp::detail {

c10::intrusive_ptr<c10d::Backend> make_gloo(const BackendSpec& spec) {
  using Gloo = c10d::ProcessGroupGloo;
  auto options = Gloo::Options::create(spec.timeout);
  const auto interface = process_env("GLOO_SOCKET_IFNAME");
  options->devices.push_back(
      interface ? Gloo::createDeviceForInterface(*interface)
                : Gloo::createDeviceForHostname(spec.address));
  options->group_name = spec.name;
  options->global_ranks_in_group.assign(spec.world_ranks.begin(), spec.world_ranks.end());
  auto gloo = c10::make_intrusive<Gloo>(spec.store, spec.rank, spec.size, options);
  // A rank that is connected may leave at once, for example with an error about its options. A peer
  // that is still connecting would then report the lost connection instead of that error.
  gloo->barrier()->wait();
  return gloo;
}

} // namespace fsdp::detail
