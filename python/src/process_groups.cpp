#include "process_groups.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <exception>
#include <map>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/text.h"
#include "failures.h"
#include "process_group/agreement.h"
#include "process_group/group_state.h"
#include "process_group/observer.h"
#include "process_group/rank_context.h"
#include "store_gather.h"

namespace fsdp::python {

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Waits without Python's lock, which another rank may need to get here.
class UnlockedWork : public c10d::Work {
 public:
  /// `object` is that of a work that is written in Python.
  explicit UnlockedWork(
      WorkPtr work,
      std::optional<Reference> object = {},
      std::shared_ptr<Failures> failures = nullptr,
      const char* kind = "")
      : work_(std::move(work)),
        object_(std::move(object)),
        failures_(std::move(failures)),
        kind_(kind),
        purpose_(failures_ ? detail::CollectiveLabel::current_purpose() : nullptr) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const Unlocked unlocked;
    if (!failures_) {
      return work_->wait(timeout);
    }
    try {
      return work_->wait(timeout);
    } catch (...) {
      const auto reason = detail::current_exception_text();
      const auto call = purpose_ ? c10::str(kind_, " ", purpose_->text) : std::string(kind_);
      throw std::runtime_error(failures_->report(call) + reason);
    }
  }

 private:
  const WorkPtr work_;
  const std::optional<Reference> object_;
  const std::shared_ptr<Failures> failures_;
  const char* const kind_;
  const detail::CollectiveLabel::Purpose purpose_;
};

/// Passes calls on to a group of Python.
class GivenBackend : public c10d::Backend {
 public:
  explicit GivenBackend(GivenGroup group)
      : Backend(group->getRank(), group->getSize()), group_(std::move(group)) {}

  const GivenGroup& group() const {
    return group_;
  }

 protected:
  const GivenGroup group_;
};

/// Calls a function of a backend without Python's lock. A thread of gloo may need the lock to drop
/// tensors, while it holds a lock that the call needs.
template <class Call>
WorkPtr issue_unlocked(
    const Call& call, std::shared_ptr<Failures> failures = nullptr, const char* kind = "") {
  const Unlocked unlocked;
  auto work = call();
  if (!work) {
    return work;
  }
  return c10::make_intrusive<UnlockedWork>(
      std::move(work), std::nullopt, std::move(failures), kind);
}

/// Passes comparisons of calls to nccl, below a group of Python.
class BackendBelow : public c10d::Backend {
 public:
  explicit BackendBelow(c10::intrusive_ptr<c10d::Backend> own)
      : Backend(own->getRank(), own->getSize()), own_(std::move(own)) {}

  WorkPtr _allgather_base(
      at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return issue_unlocked([&] { return own_->_allgather_base(out, in, options); });
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> own_;
};

/// A client of the group's store that no other thread waits with. Null if there is no store.
c10::intrusive_ptr<c10d::Store> own_client(const GivenGroup& group) {
  const auto store = group->getStore();
  const Unlocked unlocked;
  try {
    return store ? store->clone() : nullptr;
  } catch (const std::exception&) { // it cannot be cloned, for example one in Python
    return store;
  }
}

/// The usual group, whose backends are written in C++.
class NativeBackend : public GivenBackend {
 public:
  NativeBackend(
      const GivenGroup& group,
      c10::intrusive_ptr<c10d::Backend> own,
      const std::vector<int>& world_ranks)
      : GivenBackend(group),
        own_(std::move(own)),
        store_(own_client(group)),
        failures_(std::make_shared<Failures>(store_, group->getRank(), world_ranks)) {}

  /// The backend for tensors of the device.
  const c10::intrusive_ptr<c10d::Backend>& own() const {
    return own_;
  }
  /// Null if the group has none.
  const c10::intrusive_ptr<c10d::Store>& store() const {
    return store_;
  }
  const std::string getBackendName() const override {
    return own_->getBackendName();
  }

  WorkPtr _allgather_base(
      at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return issue("all_gather", [&] { return group_->_allgather_base(out, in, options); });
  }
  WorkPtr allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outs,
      std::vector<at::Tensor>& ins,
      const c10d::AllgatherOptions& options) override {
    return issue(
        "all_gather", [&] { return group_->allgather_into_tensor_coalesced(outs, ins, options); });
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return issue("reduce_scatter", [&] { return group_->_reduce_scatter_base(out, in, options); });
  }
  WorkPtr allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return issue("all_reduce", [&] { return group_->allreduce(tensors, options); });
  }
  WorkPtr broadcast(
      std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return issue("broadcast", [&] { return group_->broadcast(tensors, options); });
  }
  WorkPtr alltoall_base(
      at::Tensor& out,
      at::Tensor& in,
      std::vector<int64_t>& out_splits,
      std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions& options) override {
    return issue("all_to_all", [&] {
      return group_->alltoall_base(out, in, out_splits, in_splits, options);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return issue("barrier", [&] { return group_->barrier(options); });
  }

  bool supportsTensorAlloc(c10::DeviceIndex device) override {
    return own_->supportsTensorAlloc(device);
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return own_->allocateTensor(size, options);
  }

 private:
  template <class Call>
  WorkPtr issue(const char* kind, const Call& call) const {
    return issue_unlocked(call, failures_, kind);
  }

  const c10::intrusive_ptr<c10d::Backend> own_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<Failures> failures_;
};

/// A group that is written in Python, which only the functions of torch.distributed know to call.
class PythonBackend : public GivenBackend {
 public:
  explicit PythonBackend(const GivenGroup& group) : GivenBackend(group) {}

  const std::string getBackendName() const override {
    return group_->getBackendName();
  }

  WorkPtr _allgather_base(
      at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& /*options*/) override {
    const Locked locked;
    static constinit Function function{"all_gather_single", "all_gather_into_tensor"};
    return call(function, out, in);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    const Locked locked;
    static constinit Function function{"reduce_scatter_single", "reduce_scatter_tensor"};
    return call(function, out, in, py::arg("op") = options.reduceOp);
  }
  WorkPtr allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    const Locked locked;
    static constinit Function function{"all_reduce"};
    return call(function, tensors.at(0), py::arg("op") = options.reduceOp);
  }
  WorkPtr broadcast(
      std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    const Locked locked;
    static constinit Function function{"broadcast"};
    return call(function, tensors.at(0), py::arg("group_src") = options.rootRank);
  }
  WorkPtr alltoall_base(
      at::Tensor& out,
      at::Tensor& in,
      std::vector<int64_t>& out_splits,
      std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions& /*options*/) override {
    const Locked locked;
    static constinit Function function{"all_to_all_single"};
    return call(function, out, in, out_splits, in_splits);
  }

 private:
  /// A function of torch.distributed. torch 2.13 has new names for some.
  struct Function {
    const char* name = nullptr;
    const char* older_name = nullptr;
    const char* found = nullptr; // the one that this torch has
  };

  /// Needs Python's lock.
  template <class... Args>
  WorkPtr call(Function& function, Args&&... args) const {
    const auto module = py::module_::import("torch.distributed");
    if (!function.found) {
      const bool is_new = !function.older_name || py::hasattr(module, function.name);
      function.found = is_new ? function.name : function.older_name;
    }
    const auto work = module.attr(function.found)(
        std::forward<Args>(args)..., py::arg("group") = group_, py::arg("async_op") = true);
    if (work.is_none()) {
      return {};
    }
    return c10::make_intrusive<UnlockedWork>(work.template cast<WorkPtr>(), Reference(work));
  }
};

c10::intrusive_ptr<c10d::Backend> backend_of(
    const GivenGroup& group, const std::vector<int>& world_ranks, c10::DeviceType device_type) {
  c10::intrusive_ptr<c10d::Backend> own;
  try {
    own = group->getBackend(device_type);
  } catch (const c10::Error&) {
    return c10::make_intrusive<PythonBackend>(group);
  }
  return c10::make_intrusive<NativeBackend>(group, std::move(own), world_ranks);
}

/// Lives as long as the process, because nobody may drop it after the interpreter has ended.
std::optional<Reference>& new_group() {
  static auto* function = new std::optional<Reference>();
  return *function;
}

/// The ranks of nccl compare their calls once per step, and those of gloo on the CPU, through the
/// store.
void compare_calls_of(detail::GroupState& state, c10::DeviceType device_type) {
  const auto* backend = dynamic_cast<const NativeBackend*>(state.backend.get());
  if (!backend || backend->getSize() == 1 || !detail::checks_collectives()) {
    return;
  }
  const auto name = backend->getBackendName();
  const auto& store = backend->store();
  c10::intrusive_ptr<c10d::Backend> compares;
  // Without multiGet the store is a file, for example, which would grow with each step.
  if (name == "gloo" && device_type == c10::kCPU && store && store->hasExtendedApi()) {
    const auto timeout = backend->own()->getBackendOptions()->timeout;
    compares = c10::make_intrusive<StoreGather>(
        store, backend->getRank(), StoreGather::Group{state.name, state.world_ranks, timeout});
  } else if (name == "nccl") {
    compares = c10::make_intrusive<BackendBelow>(backend->own());
  }
  if (compares) {
    state.history = std::make_unique<detail::CallHistory>(
        detail::Members{std::move(compares), state.name, state.world_ranks});
  }
}

/// Makes further groups by asking Python: for parameters that stay divided over neighbours after
/// forward, or for reductions beside gathers.
class GivenFactory : public detail::BackendFactory {
 public:
  GivenFactory(const GivenGroup& world, c10::DeviceType device_type)
      : BackendFactory(world->getRank(), world->getBackendName()), device_type_(device_type) {}

  c10::intrusive_ptr<c10d::Store> store() const override {
    return store_;
  }
  void set_store(c10::intrusive_ptr<c10d::Store> store) {
    store_ = std::move(store);
  }

 protected:
  c10::intrusive_ptr<c10d::Backend> make(
      const std::string& /*name*/, const std::vector<int>& world_ranks, int /*rank*/) override {
    const Locked locked;
    const auto group = new_group()->handle()(world_ranks).cast<GivenGroup>();
    return backend_of(group, world_ranks, device_type_);
  }
  void choose_comparison(detail::GroupState& group) const override {
    compare_calls_of(group, device_type_);
  }

 private:
  const c10::DeviceType device_type_;
  c10::intrusive_ptr<c10d::Store> store_;
};

/// What belongs to one default group. It stays until Python drops that group
/// (destroy_process_group): modules come and go at other moments on each rank, but the ranks count
/// their calls together.
struct World {
  std::shared_ptr<GivenFactory> factory;
  std::map<std::pair<c10d::ProcessGroup*, c10::DeviceType>, std::shared_ptr<detail::GroupState>>
      groups;
  std::shared_ptr<detail::RankContext> context; // once somebody has entered it
  std::thread::id entered_by;
};

/// By their default groups.
std::map<c10d::ProcessGroup*, World>& worlds() {
  static auto* all = new std::map<c10d::ProcessGroup*, World>();
  return *all;
}

/// Needs Python's lock.
World& world_of(const GivenGroup& group, c10::DeviceType device_type) {
  const auto [found, is_new] = worlds().try_emplace(group.get());
  if (is_new) {
    found->second.factory = std::make_shared<GivenFactory>(group, device_type);
    const auto forget = [key = group.get()](py::handle reference) {
      if (worlds().at(key).context) {
        detail::set_process_context(nullptr);
      }
      worlds().erase(key);
      reference.dec_ref();
    };
    py::weakref(py::cast(group), py::cpp_function(forget)).release();
  }
  return found->second;
}

} // namespace

ProcessGroup group_of(
    const GivenGroup& group,
    const std::vector<int>& world_ranks,
    const GivenGroup& world,
    c10::DeviceType device_type) {
  auto& known = world_of(world, device_type);
  auto& state = known.groups[{group.get(), device_type}];
  if (!state) {
    auto made = std::make_shared<detail::GroupState>();
    made->backend = backend_of(group, world_ranks, device_type);
    made->name = detail::join(world_ranks, "-");
    made->world_ranks = world_ranks;
    made->factory = known.factory;
    compare_calls_of(*made, device_type);
    state = std::move(made);
    if (group != world) { // whose own end is the end of all
      const auto forget = [of = world.get(), key = group.get(), device_type](py::handle reference) {
        if (const auto found = worlds().find(of); found != worlds().end()) {
          found->second.groups.erase({key, device_type});
        }
        reference.dec_ref();
      };
      py::weakref(py::cast(group), py::cpp_function(forget)).release();
    }
  }
  return ProcessGroup(state);
}

void enter_world(
    const GivenGroup& world,
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::string& device_type) {
  const auto type = c10::Device(device_type).type();
  auto& known = world_of(world, type);
  if (!known.context) {
    std::vector<int> ranks(world->getSize());
    std::iota(ranks.begin(), ranks.end(), 0);
    known.factory->set_store(store);
    known.context = std::make_shared<detail::RankContext>();
    known.context->factory = known.factory;
    known.context->world = group_of(world, ranks, world, type);
  }
  // A world that nobody has destroyed yet may be an older one of this rank.
  for (const auto& [key, other] : worlds()) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !other.context || other.context->world.rank() == world->getRank() ||
            other.entered_by == std::this_thread::get_id(),
        "[checkpoint] rank ", world->getRank(), " and rank ", other.context->world.rank(),
        " are threads of one process; fsdp_cpp.save, async_save and load need a process for each "
        "rank, torch.distributed.checkpoint does not");
  }
  known.entered_by = std::this_thread::get_id();
  detail::set_process_context(known.context);
}

void leave_world() {
  detail::set_process_context(nullptr);
}

GivenGroup given_group(const ProcessGroup& group) {
  const auto* backend = dynamic_cast<const GivenBackend*>(group.backend().get());
  TORCH_CHECK(backend, "group '", group.name(), "' of one rank has no counterpart in Python");
  return backend->group();
}

void set_new_group(py::object function) {
  new_group().emplace(std::move(function));
}

} // namespace fsdp::python
