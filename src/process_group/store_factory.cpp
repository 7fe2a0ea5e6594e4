#include "process_group/store_factory.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <thread>
#include <utility>

#include "base/check.h"
#include "base/text.h"

namespace fsdp::detail {

StoreFactory::StoreFactory(
    Rendezvous rendezvous,
    std::string transport,
    std::chrono::milliseconds timeout,
    MakeBackend make_backend)
    : BackendFactory(rendezvous.rank, std::move(transport)),
      rendezvous_(std::move(rendezvous)),
      timeout_(timeout),
      make_backend_(std::move(make_backend)) {}

std::string StoreFactory::diagnose() {
  constexpr const char* kKey = "first_diagnosis";
  auto gone = rendezvous_.liveness->gone();
  // A dying process closes its sockets one by one, and the socket of its Liveness
  // may be the last.
  for (int attempt = 0; attempt < 10 && gone.empty(); ++attempt) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    gone = rendezvous_.liveness->gone();
  }
  if (gone.empty()) {
    return "every rank is alive, as far as can be told: one of them is late or failed in another "
           "way";
  }
  const auto diagnosis = "rank " + join(gone) + (gone.size() == 1 ? " is gone" : " are gone");
  // Ranks that fail because of this will soon be gone too. So all ranks report the
  // diagnosis of the first one.
  try {
    return rendezvous_.store->compareSet(kKey, "", diagnosis);
  } catch (const std::exception&) {
    return diagnosis; // the store is gone too
  }
}

c10::intrusive_ptr<c10d::Backend> StoreFactory::make(
    const std::string& name, const std::vector<int>& world_ranks, int rank) {
  try {
    return make_backend_(
        {.store = c10::make_intrusive<c10d::PrefixStore>("group/" + name, rendezvous_.store),
         .rank = rank,
         .size = static_cast<int>(world_ranks.size()),
         .name = name,
         .world_ranks = world_ranks,
         .address = rendezvous_.address,
         .timeout = timeout_});
  } catch (...) {
    const auto reason = current_exception_text();
    FSDP_THROW(
        CommError, "rank ", rendezvous_.rank, " could not connect group '", name, "': ", diagnose(),
        "; ", reason);
  }
}

} // namespace fsdp::detail
