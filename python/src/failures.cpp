#include "failures.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <future>
#include <numeric>
#include <thread>
#include <utility>

#include "base/text.h"
#include "interpreter.h"

namespace fsdp::python {

namespace {

std::string key(int rank) {
  return "fsdp_cpp/failed/" + std::to_string(rank);
}

} // namespace

Failures::Failures(c10::intrusive_ptr<c10d::Store> store, int rank, std::vector<int> world_ranks)
    : store_(std::move(store)), rank_(rank), world_ranks_(std::move(world_ranks)) {
  if (store_) {
    const Unlocked unlocked;
    try {
      store_->deleteKey(key(rank_));  // of an earlier world on the same store
    } catch (const std::exception&) { // the first collective will say so
    }
  }
}

std::string Failures::report(const std::string& call) {
  if (!store_ || reported_.exchange(true)) {
    return "";
  }
  // A thread of its own, because a store whose process is stopped never answers.
  const auto asked = std::make_shared<std::promise<std::string>>();
  auto answer = asked->get_future();
  std::thread([self = shared_from_this(), asked, call] {
    asked->set_value(self->ask(call));
  }).detach();
  return answer.wait_for(std::chrono::seconds(4)) == std::future_status::ready ? answer.get() : "";
}

std::string Failures::ask(const std::string& call) const {
  try {
    store_->set(key(rank_), std::vector<uint8_t>(call.begin(), call.end()));
    const auto silent = silent_ranks();
    std::string text;
    if (!silent.empty()) {
      text = "rank " + detail::join(silent) + (silent.size() == 1 ? " is" : " are") +
             " late or gone, or still waiting; ";
    }
    for (size_t rank = 0; rank < world_ranks_.size(); ++rank) {
      if (std::find(silent.begin(), silent.end(), world_ranks_[rank]) == silent.end()) {
        const auto bytes = store_->get(key(static_cast<int>(rank)));
        const std::string theirs(bytes.begin(), bytes.end());
        if (theirs != call) {
          text += "on rank " + std::to_string(world_ranks_[rank]) + " the call that failed is " +
                  theirs + "; ";
        }
      }
    }
    return text;
  } catch (const std::exception&) {
    return ""; // the store is gone, too
  }
}

/// The ranks of the world that report nothing within two seconds.
std::vector<int> Failures::silent_ranks() const {
  std::vector<int> silent(world_ranks_.size()); // by their ranks in the group
  std::iota(silent.begin(), silent.end(), 0);
  constexpr int kAttempts = 40;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    std::erase_if(silent, [&](int rank) { return store_->check({key(rank)}); });
    if (silent.empty()) {
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  std::transform(
      silent.begin(), silent.end(), silent.begin(), [&](int rank) { return world_ranks_[rank]; });
  return silent;
}

} // namespace fsdp::python
