#include "store_gather.h"

#include <c10/util/Exception.h>
#include <fsdp/error.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "base/check.h"
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

/// The values of the keys. One that is not there yet is empty.
std::vector<Bytes> values_of(c10d::Store& store, const std::vector<std::string>& keys) {
  if (store.check(keys)) {
    return store.multiGet(keys);
  }
  std::vector<Bytes> values;
  for (const auto& key : keys) {
    values.push_back(store.check({key}) ? store.get(key) : Bytes());
  }
  return values;
}

} // namespace

class StoreGather::Gathering : public c10d::Work {
 public:
  Gathering(const StoreGather& gather, std::vector<std::string> keys, at::Tensor out, at::Tensor in)
      : store_(gather.store_),
        group_(gather.group_),
        number_(gather.number_),
        keys_(std::move(keys)),
        out_(std::move(out)),
        in_(std::move(in)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const Unlocked unlocked;
    const auto limit = timeout == kNoTimeout ? group_.timeout : timeout;
    const auto start = std::chrono::steady_clock::now();
    // Asks again and again: a store that waits would answer nothing else meanwhile.
    std::chrono::microseconds pause(100);
    for (auto late = take(); !late.empty(); late = take()) {
      if (std::chrono::steady_clock::now() - start > limit) {
        FSDP_THROW(
            CommError, "in group '", group_.name, "' rank ", detail::join(late),
            late.size() == 1 ? " is" : " are",
            " late or gone: the ranks cannot compare the calls of their last steps");
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 3 / 2, std::chrono::microseconds(10'000));
    }
    return true;
  }

 private:
  /// Copies the tensors of all ranks. Returns the ranks whose tensors are not there yet.
  std::vector<int> take() {
    std::vector<Bytes> rows;
    try {
      rows = values_of(*store_, keys_);
    } catch (const c10::DistError&) { // the store has ended
      rows.assign(keys_.size(), packed(number_, in_));
    }
    std::vector<int> late;
    auto* to = static_cast<char*>(out_.mutable_data_ptr());
    for (size_t rank = 0; rank < rows.size(); ++rank, to += in_.nbytes()) {
      if (is_of(number_, rows[rank])) {
        std::memcpy(to, rows[rank].data() + sizeof(number_), in_.nbytes());
      } else {
        late.push_back(group_.world_ranks[rank]);
      }
    }
    return late;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const Group group_;
  const int64_t number_;
  const std::vector<std::string> keys_; // by rank
  const at::Tensor out_;
  const at::Tensor in_;
};

StoreGather::StoreGather(c10::intrusive_ptr<c10d::Store> store, int rank, Group group)
    : Backend(rank, static_cast<int>(group.world_ranks.size())),
      store_(std::move(store)),
      group_(std::move(group)) {
  const Unlocked unlocked;
  // An earlier group on the same store has left keys. All ranks have made as many groups.
  const auto groups = store_->add("fsdp_cpp/groups/" + std::to_string(rank), 1);
  prefix_ = "fsdp_cpp/calls/" + std::to_string(groups) + "/";
}

c10::intrusive_ptr<c10d::Work> StoreGather::_allgather_base(
    at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& /*options*/) {
  // Two keys for each rank are enough: a rank begins a gather when it has the one before, to which
  // all have brought their tensors.
  ++number_;
  std::vector<std::string> keys;
  for (int rank = 0; rank < getSize(); ++rank) {
    keys.push_back(prefix_ + std::to_string(number_ % 2) + "/" + std::to_string(rank));
  }
  try {
    const Unlocked unlocked;
    store_->set(keys[getRank()], packed(number_, in));
  } catch (const c10::DistError&) { // the store has ended, as the Work will find
  }
  return c10::make_intrusive<Gathering>(*this, std::move(keys), out, in);
}

} // namespace fsdp::python
