#include <fsdp/device_budget.h>

#include <c10/util/Exception.h>
#include <fsdp/distributed.h>

#include <map>
#include <mutex>

namespace fsdp {

/// Ranks that are threads may share one budget object, and must all decide alike. So each rank has
/// its own account.
struct DeviceBudget::Ledger {
  const int64_t bytes;
  const int states;
  std::mutex mutex;
  std::map<int, int64_t> taken; // by rank
};

DeviceBudget::DeviceBudget(int64_t bytes, int states)
    : ledger_(new Ledger{.bytes = bytes, .states = states, .mutex = {}, .taken = {}}) {
  TORCH_CHECK_VALUE(bytes >= 0, "[DeviceBudget] ", bytes, " bytes are less than none");
  TORCH_CHECK_VALUE(states >= 0, "[DeviceBudget] ", states, " optimizer states are less than none");
}

bool DeviceBudget::take(int64_t bytes) const {
  const std::lock_guard lock(ledger_->mutex);
  auto& taken = ledger_->taken[get_rank()];
  if (bytes > ledger_->bytes - taken) {
    return false;
  }
  taken += bytes;
  return true;
}

int64_t DeviceBudget::left() const {
  const std::lock_guard lock(ledger_->mutex);
  return ledger_->bytes - ledger_->taken[get_rank()];
}

int DeviceBudget::states() const {
  return ledger_->states;
}

} // namespace fsdp
