#include "store_gather.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "base/text.h"
#include "interpreter.h"

namespace fsdp::python {

namespace {

using Bytes = std::vector<uint8_t>;

/// What a rank has in the store: the number of the gather, then its tensor.
Bytes packed(int64_t number, const at::Tensor& tensor) {
  Bytes bytes(sizeof(number) + tensor.nbytes());
  std::memcpy(bytes.data(), &number, sizeof(number));
  std::memcpy(bytes.data() + sizeof(number), tensor.const_data_ptr(), tensor.nbytes());
  return bytes;
}

bool is_of(int64_t number, const Bytes& bytes) {
  return bytes.size() >= sizeof(number) && std::memcmp(bytes.data(), &number, sizeof(number)) == 0;
}

class StoreWork : public c10d::Work {
 public:
  StoreWork(
      c10::intrusive_ptr<c10d::Store> store,
      std::vector<std::string> keys,
      int64_t number,
      at::Tensor out)
      : store_(std::move(store)), keys_(std::move(keys)), number_(number), out_(std::move(out)) {}

  /// Asks again and again, because a store that waits lets no other thread ask.
  bool wait(std::chrono::milliseconds timeout) override {
    const Unlocked unlocked;
    const auto limit = timeout == kNoTimeout ? store_->getTimeout() : timeout;
    const auto start = std::chrono::steady_clock::now();
    std::chrono::microseconds pause(100);
    for (auto missing = take(); !missing.empty(); missing = take()) {
      if (std::chrono::steady_clock::now() - start > limit) {
        throw std::runtime_error(
            "the ranks cannot compare the calls of their last steps: rank " +
            detail::join(missing) + (missing.size() == 1 ? " is" : " are") + " late or gone");
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 3 / 2, std::chrono::microseconds(10'000));
    }
    return true;
  }

 private:
  /// Copies what is there. Returns the ranks whose tensors are not there yet.
  std::vector<int> take() {
    std::vector<int> missing;
    const auto row_bytes = out_.nbytes() / keys_.size();
    auto* rows = static_cast<char*>(out_.mutable_data_ptr());
    for (size_t rank = 0; rank < keys_.size(); ++rank) {
      if (keys_[rank].empty()) {
        continue; // taken already
      }
      const auto bytes = store_->check({keys_[rank]}) ? store_->get(keys_[rank]) : Bytes();
      if (!is_of(number_, bytes)) {
        missing.push_back(static_cast<int>(rank));
        continue;
      }
      std::memcpy(rows + rank * row_bytes, bytes.data() + sizeof(number_), row_bytes);
      keys_[rank].clear();
    }
    return missing;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  std::vector<std::string> keys_; // by rank
  const int64_t number_;
  const at::Tensor out_;
};

} // namespace

StoreGather::StoreGather(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
    : Backend(rank, size), store_(std::move(store)) {
  const Unlocked unlocked;
  // An earlier world on the same store has left keys. All ranks have made as many worlds.
  const auto worlds = store_->add("fsdp_cpp/worlds/" + std::to_string(rank), 1);
  prefix_ = "fsdp_cpp/calls/" + std::to_string(worlds) + "/";
}

c10::intrusive_ptr<c10d::Work> StoreGather::_allgather_base(
    at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& /*options*/) {
  // Two keys for each rank are enough: a rank begins a gather when it has the one before, to which
  // all have brought their tensors.
  ++number_;
  const auto key = [&](int rank) {
    return prefix_ + std::to_string(number_ % 2) + "/" + std::to_string(rank);
  };
  {
    const Unlocked unlocked;
    store_->set(key(getRank()), packed(number_, in));
  }
  std::vector<std::string> keys;
  for (int rank = 0; rank < getSize(); ++rank) {
    keys.push_back(key(rank));
  }
  return c10::make_intrusive<StoreWork>(store_, std::move(keys), number_, out);
}

} // namespace fsdp::python
