#include "optim/low_precision_step.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "base/hash.h"
#include "base/shard_key.h"
#include "optim/rounding.h"
#include "optim/update.h"

namespace fsdp::detail {

namespace {

/// Lets a thread use shards, without autograd.
struct BelowAutograd {
  const at::AutoDispatchBelowADInplaceOrView below;
  const UnguardedShards unguarded;
};

uint64_t key_of(const LowPrecisionStep& step, int64_t seed) {
  auto key = kEmptyHash;
  for (const auto part :
       {static_cast<uint64_t>(seed), static_cast<uint64_t>(step.group),
        static_cast<uint64_t>(step.index), static_cast<uint64_t>(step.num_steps)}) {
    key = add_to_hash(key, part);
  }
  return key;
}

/// Updates a parameter, part by part.
class PartUpdater {
 public:
  PartUpdater(const LowPrecisionStep& step, const optim::LowPrecisionAdamWOptions& options)
      : step_(step),
        options_(options),
        param_(step.param.contiguous().view(-1)),
        grad_(step.grad.contiguous().view(-1)),
        numbers_(step.param, step.spec),
        key_(key_of(step, options.seed())) {}

  /// Updates the elements [begin, end).
  void run(int64_t begin, int64_t end) const {
    const BelowAutograd in_this_thread;
    const auto& [first, second] = step_.moments;
    const auto stored = param_.slice(0, begin, end);
    const auto values = stored.to(at::kFloat); // the parameter itself if it is in fp32
    const auto exp_avg = first.read(begin, end);
    const auto exp_avg_sq = second.read(begin, end);
    const auto [beta1, beta2] = options_.betas();
    const auto num_steps = at::full({}, step_.num_steps + 1, values.options());
    at::_fused_adamw_(
        {values}, {grad_.slice(0, begin, end).to(at::kFloat)}, {exp_avg}, {exp_avg_sq}, {},
        {num_steps}, options_.lr(), beta1, beta2, options_.weight_decay(), options_.eps(),
        /*amsgrad=*/false, /*maximize=*/false);
    const bool is_low = stored.scalar_type() == at::kBFloat16;
    std::array<at::Tensor, 3> random;
    if (options_.stochastic_rounding() && (is_low || options_.moments() != at::kFloat)) {
      random = random_bits(numbers_.slice(begin, end), key_);
    }
    if (is_low) {
      if (options_.stochastic_rounding()) {
        round_stochastically_(values, random[0], /*mantissa_bits=*/7);
      }
      stored.copy_(values);
    }
    first.write(begin, exp_avg, random[1]);
    second.write(begin, exp_avg_sq, random[2]);
  }

  void finish() const {
    if (!step_.param.is_contiguous()) {
      step_.param.copy_(param_.view(step_.param.sizes()));
    }
  }

 private:
  const LowPrecisionStep& step_;
  const optim::LowPrecisionAdamWOptions& options_;
  const at::Tensor param_;
  const at::Tensor grad_;
  const ElementNumbers numbers_;
  const uint64_t key_;
};

} // namespace

void check(const optim::LowPrecisionAdamWOptions& options) {
  const auto dtype = options.moments();
  TORCH_CHECK_VALUE(
      dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kFloat8_e4m3fn, "[",
      kLowPrecisionAdamW, "] moments is ", dtype, ", not Float, BFloat16 or Float8_e4m3fn");
  const auto check_positive = [](const char* name, double value) {
    check_option(kLowPrecisionAdamW, name, value, value >= 0, "0 or more");
  };
  check_positive("lr", options.lr());
  check_positive("eps", options.eps());
  check_positive("weight_decay", options.weight_decay());
  check_betas(kLowPrecisionAdamW, options.betas());
}

void check_param(const at::Tensor& param, std::size_t group, std::size_t index) {
  const auto dtype = param.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kBFloat16 || dtype == at::kFloat, "[", kLowPrecisionAdamW, "] parameter ", index,
      " of group ", group, " is of dtype ", dtype, ", not BFloat16 or Float");
}

void run(const LowPrecisionStep& step, const optim::LowPrecisionAdamWOptions& options) {
  const BelowAutograd in_this_thread;
  const auto numel = step.param.numel();
  if (numel > 0) {
    const PartUpdater updater(step, options);
    // On the CPU a part stays in the cache while two dozen operators work on it. An operator on so
    // few elements uses one thread.
    const bool on_cpu = step.param.is_cpu();
    const int64_t part = on_cpu ? 1 << 15 : 1 << 22;
    const auto num_parts = (numel + part - 1) / part;
    const auto run_parts = [&](int64_t first, int64_t last) {
      for (auto i = first; i < last; ++i) {
        updater.run(i * part, std::min(numel, (i + 1) * part));
      }
    };
    if (on_cpu) {
      at::parallel_for(0, num_parts, 1, run_parts);
    } else {
      run_parts(0, num_parts);
    }
    updater.finish();
  }
  step.param.unsafeGetTensorImpl()->bump_version();
}

} // namespace fsdp::detail
