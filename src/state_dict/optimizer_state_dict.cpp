#include <fsdp/state_dict.h>

#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <fsdp/low_precision_adamw.h>
#include <fsdp/muon.h>

#include <deque>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>

#include "module/module_tree.h"
#include "optim/moment.h"
#include "state_dict/entries.h"

namespace fsdp {

namespace {

using detail::Entry;
namespace optim = torch::optim;

// ------------------------------------------------------------ Optimizers
//
// Each Kind lists the state that an optimizer keeps for a parameter of `num_dims` dims, under
// Python's names. `hyper(name, value)` is called for each option, `number(name, value, used)` for
// each number of the state, and `tensor(name, tensor, used, start)` for each tensor of the state,
// which has the sizes of the parameter. `used` says whether these options need it. A new tensor is
// filled with `start`; its dtype is that of the parameter, unless a last argument gives another
// one. If what is stored does not have the sizes of the parameter and a common dtype, `unpack`
// makes it so, and `pack` stores it again.

template <class Optimizer, class OptimizerOptions, class ParamState>
struct Types {
  using Type = Optimizer;
  using Options = OptimizerOptions;
  using State = ParamState;
};

template <class Optimizer, class Options, class State>
struct AdamKind : Types<Optimizer, Options, State> {
  static void options(Options& options, auto hyper) {
    hyper("lr", options.lr());
    hyper("betas.0", std::get<0>(options.betas()));
    hyper("betas.1", std::get<1>(options.betas()));
    hyper("eps", options.eps());
    hyper("weight_decay", options.weight_decay());
    hyper("amsgrad", options.amsgrad());
  }
  static void state(State& state, const Options& options, int64_t, auto number, auto tensor) {
    number("step", state.step(), true);
    tensor("exp_avg", state.exp_avg(), true, 0.0);
    tensor("exp_avg_sq", state.exp_avg_sq(), true, 0.0);
    tensor("max_exp_avg_sq", state.max_exp_avg_sq(), options.amsgrad(), 0.0);
  }
};

struct SGDKind : Types<optim::SGD, optim::SGDOptions, optim::SGDParamState> {
  static void options(Options& options, auto hyper) {
    hyper("lr", options.lr());
    hyper("momentum", options.momentum());
    hyper("dampening", options.dampening());
    hyper("weight_decay", options.weight_decay());
    hyper("nesterov", options.nesterov());
  }
  static void state(State& state, const Options& options, int64_t, auto /*number*/, auto tensor) {
    tensor("momentum_buffer", state.momentum_buffer(), options.momentum() != 0, 0.0);
  }
};

struct RMSpropKind : Types<optim::RMSprop, optim::RMSpropOptions, optim::RMSpropParamState> {
  static void options(Options& options, auto hyper) {
    hyper("lr", options.lr());
    hyper("alpha", options.alpha());
    hyper("eps", options.eps());
    hyper("weight_decay", options.weight_decay());
    hyper("momentum", options.momentum());
    hyper("centered", options.centered());
  }
  static void state(State& state, const Options& options, int64_t, auto number, auto tensor) {
    number("step", state.step(), true);
    tensor("square_avg", state.square_avg(), true, 0.0);
    tensor("momentum_buffer", state.momentum_buffer(), options.momentum() > 0, 0.0);
    tensor("grad_avg", state.grad_avg(), options.centered(), 0.0);
  }
};

struct AdagradKind : Types<optim::Adagrad, optim::AdagradOptions, optim::AdagradParamState> {
  static void options(Options& options, auto hyper) {
    hyper("lr", options.lr());
    hyper("lr_decay", options.lr_decay());
    hyper("weight_decay", options.weight_decay());
    hyper("initial_accumulator_value", options.initial_accumulator_value());
    hyper("eps", options.eps());
  }
  static void state(State& state, const Options& options, int64_t, auto number, auto tensor) {
    number("step", state.step(), true);
    tensor("sum", state.sum(), true, options.initial_accumulator_value());
  }
};

struct MuonKind : Types<fsdp::optim::Muon, fsdp::optim::MuonOptions, fsdp::optim::MuonParamState> {
  static void options(Options& options, auto hyper) {
    hyper("lr", options.lr());
    hyper("weight_decay", options.weight_decay());
    hyper("momentum", options.momentum());
    hyper("nesterov", options.nesterov());
    hyper("ns_coefficients.0", std::get<0>(options.ns_coefficients()));
    hyper("ns_coefficients.1", std::get<1>(options.ns_coefficients()));
    hyper("ns_coefficients.2", std::get<2>(options.ns_coefficients()));
    hyper("eps", options.eps());
    hyper("ns_steps", options.ns_steps());
    hyper("match_rms_adamw", options.match_rms_adamw());
    hyper("blocks", options.blocks());
    hyper("adamw", options.adamw());
    hyper("betas.0", std::get<0>(options.betas()));
    hyper("betas.1", std::get<1>(options.betas()));
    hyper("adamw_eps", options.adamw_eps());
  }
  static void state(
      State& state, const Options& options, int64_t num_dims, auto number, auto tensor) {
    const bool by_muon = options.updates_by_muon(num_dims);
    tensor("momentum_buffer", state.momentum_buffer(), by_muon, 0.0);
    number("step", state.step(), !by_muon);
    tensor("exp_avg", state.exp_avg(), !by_muon, 0.0);
    tensor("exp_avg_sq", state.exp_avg_sq(), !by_muon, 0.0);
  }
};

struct LowPrecisionAdamWKind : Types<
                                   fsdp::optim::LowPrecisionAdamW,
                                   fsdp::optim::LowPrecisionAdamWOptions,
                                   fsdp::optim::LowPrecisionAdamWParamState> {
  static void options(Options& options, auto hyper) {
    hyper("lr", options.lr());
    hyper("betas.0", std::get<0>(options.betas()));
    hyper("betas.1", std::get<1>(options.betas()));
    hyper("eps", options.eps());
    hyper("weight_decay", options.weight_decay());
    hyper("stochastic_rounding", options.stochastic_rounding());
    hyper("seed", options.seed());
  }
  static void state(State& state, const Options& options, int64_t, auto number, auto tensor) {
    const auto dtype = options.moments() == at::kFloat ? at::kFloat : at::kBFloat16;
    number("step", state.step(), true);
    tensor("exp_avg", state.exp_avg(), true, 0.0, dtype);
    tensor("exp_avg_sq", state.exp_avg_sq(), true, 0.0, dtype);
  }
  static void unpack(State& state) {
    for (const auto& moment : detail::moments_of(state)) {
      if (moment.values.defined() && moment.has_scales()) {
        // In bf16 nothing is lost: four significant bits have a square of eight.
        const auto floats = moment.read(0, moment.values.numel());
        moment.values = floats.to(at::kBFloat16).view(moment.values.sizes());
        moment.scale.reset();
      }
    }
  }
  static void pack(State& state, const Options& options) {
    for (const auto& moment : detail::moments_of(state)) {
      if (moment.values.scalar_type() != options.moments()) {
        const auto floats = moment.values.to(at::kFloat, false, /*copy=*/true).view(-1);
        moment.make(moment.values, options.moments());
        moment.write(0, floats, /*random_bits=*/{});
      }
    }
  }
};

/// Calls `use` with the kind of the optimizer. The optimizers of fsdp::optim derive from torch's,
/// so they have the same kinds.
template <class Use>
void with_kind_of(const char* function, optim::Optimizer& optimizer, Use use) {
  const auto try_one = [&]<class Kind>(Kind kind) {
    if (dynamic_cast<typename Kind::Type*>(&optimizer)) {
      use(kind);
      return true;
    }
    return false;
  };
  const bool known =
      try_one(AdamKind<optim::AdamW, optim::AdamWOptions, optim::AdamWParamState>{}) ||
      try_one(AdamKind<optim::Adam, optim::AdamOptions, optim::AdamParamState>{}) ||
      try_one(SGDKind{}) || try_one(RMSpropKind{}) || try_one(AdagradKind{}) ||
      try_one(MuonKind{}) || try_one(LowPrecisionAdamWKind{});
  TORCH_CHECK_VALUE(
      known, "[", function, "] the state of ", detail::type_name(typeid(optimizer)),
      " is not supported. Supported are Adam, AdamW, SGD, RMSprop, Adagrad, Muon, "
      "LowPrecisionAdamW "
      "and classes derived from them. Put the state of another optimizer into a StateDict "
      "yourself");
}

// ------------------------------------------------------------ Names

struct Named {
  std::string name;
  at::Tensor param;
  size_t group;
};

/// Returns the optimizer's parameters, each once, with their first names in the module.
std::vector<Named> named_params(
    const char* function, torch::nn::Module& module, optim::Optimizer& optimizer) {
  std::unordered_map<const at::TensorImpl*, std::string> names;
  for (const auto& [name, param] : detail::distinct_parameters(module)) {
    names.emplace(param.unsafeGetTensorImpl(), name);
  }
  std::vector<Named> params;
  std::set<const at::TensorImpl*> seen;
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    const auto& members = optimizer.param_groups()[group].params();
    for (size_t index = 0; index < members.size(); ++index) {
      const auto found = names.find(members[index].unsafeGetTensorImpl());
      TORCH_CHECK_VALUE(
          found != names.end(), "[", function, "] parameter ", index, " of the optimizer's group ",
          group, ", of sizes ", members[index].sizes(),
          ", is not one of the module's, so it has no name: give the module that all of them are "
          "in");
      if (seen.insert(found->first).second) {
        params.push_back({found->second, members[index], group});
      }
    }
  }
  return params;
}

// ------------------------------------------------------------ Entries

/// Copies of an optimizer's options and states, which are changed before `commit` puts them into
/// the optimizer. The copies share the optimizer's tensors.
template <class Kind>
class Copies {
 public:
  /// `given`: the state dict to set, or null to get one. With `ignore_frozen`, the keys of frozen
  /// parameters may be missing in it.
  Copies(
      const char* function, optim::Optimizer& optimizer, const StateDict* given, bool ignore_frozen)
      : function_(function), optimizer_(optimizer), given_(given), ignore_frozen_(ignore_frozen) {}

  std::vector<Entry> entries(const std::vector<Named>& params) {
    for (const auto& group : optimizer_.param_groups()) {
      options_.push_back(dynamic_cast<const typename Kind::Options&>(group.options()));
    }
    std::vector<Entry> hypers; // first, because they decide which state is used
    for (const auto& param : params) {
      add_hypers(param, hypers);
    }
    std::vector<Entry> entries;
    for (const auto& param : params) {
      add_state(param, entries);
    }
    entries.insert(entries.end(), hypers.begin(), hypers.end());
    return entries;
  }

  /// Puts the copies into the optimizer. Assigns options in place: others may hold references to
  /// them.
  void commit() {
    for (size_t group = 0; group < options_.size(); ++group) {
      dynamic_cast<typename Kind::Options&>(optimizer_.param_groups()[group].options()) =
          options_[group];
    }
    for (auto& [param, state, group] : states_) {
      if constexpr (requires { Kind::pack(state, options_[group]); }) {
        Kind::pack(state, options_[group]);
      }
      optimizer_.state()[param] = std::make_unique<typename Kind::State>(state);
    }
  }

 private:
  bool is_required(const Named& param) const {
    return !ignore_frozen_ || param.param.requires_grad();
  }
  bool is_given(const std::string& key) const {
    return given_ && given_->contains(key);
  }

  void add_hypers(const Named& param, std::vector<Entry>& entries) {
    Kind::options(options_[param.group], [&]<class T>(const char* name, T& value) {
      const auto key = "param_groups." + param.name + "." + name;
      if (is_given(key)) {
        const auto now = detail::number_as<T>(key, given_->at(key));
        const auto [first, is_first] = set_by_.try_emplace({param.group, name}, key);
        TORCH_CHECK_VALUE(
            is_first || now == value, "[", function_, "] '", key, "' is ", now, " and '",
            first->second, "' is ", value, ", but both parameters are in group ", param.group,
            " of this optimizer: give it the groups of the one that was saved");
        value = now;
      }
      entries.push_back({.key = key, .value = value, .required = is_required(param)});
    });
  }

  void add_state(const Named& param, std::vector<Entry>& entries) {
    auto& held = optimizer_.state();
    const auto found = held.find(param.param.unsafeGetTensorImpl());
    const bool exists = found != held.end() && found->second;
    auto& state = kept_.emplace_back();
    if (exists) {
      state = dynamic_cast<const typename Kind::State&>(*found->second);
      if constexpr (requires { Kind::unpack(state); }) {
        Kind::unpack(state);
      }
    }
    const auto live = detail::entry_of(param.name, param.param);
    const bool expected = exists || param.param.requires_grad();
    const auto prefix = "state." + param.name + ".";
    bool any_given = false;
    const auto number = [&](const char* name, int64_t& value, bool used) {
      const auto key = prefix + name;
      if ((expected && used) || is_given(key)) {
        any_given |= is_given(key);
        auto set = [&value, key](const StateDict::Value& now) {
          value = detail::number_as<int64_t>(key, now);
        };
        entries.push_back({.key = key, .value = value, .set = set, .required = is_required(param)});
      }
    };
    const auto tensor = [&](const char* name, at::Tensor& value, bool used, double start,
                            std::optional<at::ScalarType> dtype = {}) {
      const auto key = prefix + name;
      if (!value.defined() && !(expected && used) && !is_given(key)) {
        return;
      }
      any_given |= is_given(key);
      if (!value.defined()) {
        value = at::full_like(live.local, start, at::TensorOptions().dtype(dtype));
      }
      TORCH_CHECK_VALUE(
          value.sizes() == live.local.sizes(), "[", function_, "] '", key, "' has sizes ",
          value.sizes(), ", but the parameter, as it lies on this rank, ", live.local.sizes(),
          ": make the optimizer after fully_shard and parallelize_module");
      entries.push_back(
          {.key = key, .local = value, .spec = live.spec, .required = is_required(param)});
    };
    Kind::state(state, options_[param.group], param.param.dim(), number, tensor);
    if (any_given) {
      states_.emplace_back(param.param.unsafeGetTensorImpl(), state, param.group);
    }
  }

  const char* function_;
  torch::optim::Optimizer& optimizer_;
  const StateDict* given_;
  const bool ignore_frozen_;
  std::vector<typename Kind::Options> options_;
  std::map<std::pair<size_t, std::string>, std::string> set_by_;
  std::deque<typename Kind::State> kept_;
  std::vector<std::tuple<void*, typename Kind::State&, size_t>> states_; // with the group
};

} // namespace

StateDict get_optimizer_state_dict(
    ModuleRef module, torch::optim::Optimizer& optimizer, const StateDictOptions& options) {
  constexpr auto kFunction = "get_optimizer_state_dict";
  at::NoGradGuard no_grad;
  detail::reshard_below(*module);
  StateDict state;
  with_kind_of(kFunction, optimizer, [&]<class Kind>(Kind) {
    Copies<Kind> copies(kFunction, optimizer, nullptr, options.ignore_frozen_params);
    auto params = named_params(kFunction, *module, optimizer);
    if (options.ignore_frozen_params) {
      std::erase_if(params, [](const auto& named) { return !named.param.requires_grad(); });
    }
    state = detail::read(kFunction, copies.entries(params), options);
  });
  return state;
}

void set_optimizer_state_dict(
    ModuleRef module,
    torch::optim::Optimizer& optimizer,
    const StateDict& state,
    const StateDictOptions& options) {
  constexpr auto kFunction = "set_optimizer_state_dict";
  detail::reshard_below(*module);
  with_kind_of(kFunction, optimizer, [&]<class Kind>(Kind) {
    std::optional<Copies<Kind>> copies;
    detail::fill(
        {.function = kFunction,
         .module = *module,
         .entries =
             [&](const StateDict& given) {
               copies.emplace(kFunction, optimizer, &given, options.ignore_frozen_params);
               return copies->entries(named_params(kFunction, *module, optimizer));
             },
         .commit = [&] { copies->commit(); }},
        state, options);
  });
}

} // namespace fsdp
