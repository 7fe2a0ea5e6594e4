#include "group/reduction_queue.h"

#include <utility>

#include "group/grad_reducer.h"

namespace fsdp::detail {

namespace {

Reduction pop_oldest(std::deque<Reduction>& queue) {
  auto reduction = std::move(queue.front());
  queue.pop_front();
  return reduction;
}

} // namespace

void ReductionQueue::add(Reduction reduction) {
  reduce_scatters_.push_back(std::move(reduction));
}

void ReductionQueue::finish_reduce_scatters(size_t max_left) {
  while (reduce_scatters_.size() > max_left) {
    auto reduction = pop_oldest(reduce_scatters_);
    const auto reducer = reduction.reducer.lock();
    if (reducer && reducer->finish_reduce_scatter(reduction)) {
      finish_all_reduces(1);
      reducer->start_all_reduce(reduction, streams_->all_reduce);
      all_reduces_.push_back(std::move(reduction));
    }
  }
}

void ReductionQueue::finish_all_reduces(size_t max_left) {
  while (all_reduces_.size() > max_left) {
    auto reduction = pop_oldest(all_reduces_);
    if (const auto reducer = reduction.reducer.lock()) {
      reducer->finish_all_reduce(reduction, streams_->all_reduce);
    }
  }
}

void ReductionQueue::finish_all() {
  finish_reduce_scatters(0);
  finish_all_reduces(0);
}

void ReductionQueue::clear() {
  reduce_scatters_.clear();
  all_reduces_.clear();
}

} // namespace fsdp::detail
