#include "optim/matrix_update.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/irange.h>

#include <bit>
#include <string>
#include <utility>

#include "base/hash.h"
#include "optim/matrix_plan.h"
#include "optim/update.h"

namespace fsdp::detail {

using optim::MuonOptions;

namespace {

constexpr auto kMuonName = "Muon";

std::string text_of(const MatrixUpdate& update) {
  const auto name = name_of(update.param);
  return c10::str(
      "parameter ", update.index, " of group ", update.group,
      name.empty() ? "" : " ('" + name + "')");
}

/// Returns a hash of the values that must be the same on all ranks.
uint64_t fingerprint_of(const MatrixUpdate& update) {
  const auto& options = *update.options;
  const auto [a, b, c] = options.ns_coefficients();
  auto hash = add_to_hash(kEmptyHash, to_string(update.spec->placements));
  for (const auto size : update.sizes()) {
    hash = add_to_hash(hash, static_cast<uint64_t>(size));
  }
  for (const auto value :
       {options.lr(), options.weight_decay(), options.momentum(), options.eps(), a, b, c}) {
    hash = add_to_hash(hash, std::bit_cast<uint64_t>(value));
  }
  for (const auto value :
       {options.ns_steps(), options.blocks(), int64_t{options.nesterov()},
        int64_t{options.match_rms_adamw()}, static_cast<int64_t>(options.ns_dtype()),
        int64_t{update.grad.defined()}}) {
    hash = add_to_hash(hash, static_cast<uint64_t>(value));
  }
  return hash;
}

/// Returns every rank's `mine`, in rows.
at::Tensor gathered(
    const ProcessGroup& group, at::Device device, const std::vector<int64_t>& mine) {
  const auto sent = at::tensor(mine, at::kLong).to(device);
  const auto all = at::empty({group.size(), sent.numel()}, sent.options());
  group.all_gather(all, sent);
  return all.cpu();
}

/// Throws ValueError on all ranks, because their fingerprints differ.
[[noreturn]] void explain(
    const ProcessGroup& group,
    at::Device device,
    const std::vector<const MatrixUpdate*>& updates,
    std::vector<int64_t> fingerprints) {
  const auto counts = gathered(group, device, {static_cast<int64_t>(updates.size())});
  const auto rank_text = [&](int64_t rank) { return c10::str("rank ", group.ranks()[rank]); };
  for (const auto rank : c10::irange(group.size())) {
    TORCH_CHECK_VALUE(
        counts[rank].equal(counts[0]), "[", kMuonName, "] ", rank_text(rank), " has ",
        counts[rank].item<int64_t>(), " parameters with matrices on a mesh, and ", rank_text(0),
        " has ", counts[0].item<int64_t>(),
        "; all ranks must give the same parameters to the optimizer, in the same order");
  }
  const auto count = fingerprints.size();
  for (const auto* update : updates) {
    fingerprints.push_back(update->grad.defined() ? 1 : 0);
  }
  const auto all = gathered(group, device, fingerprints);
  for (const auto i : c10::irange(count)) {
    for (const auto rank : c10::irange(group.size())) {
      const auto here = static_cast<int64_t>(i);
      const auto has_grad = static_cast<int64_t>(count + i);
      TORCH_CHECK_VALUE(
          all[rank][has_grad].equal(all[0][has_grad]), "[", kMuonName, "] ", text_of(*updates[i]),
          " has a gradient on ", rank_text(all[0][has_grad].item<bool>() ? 0 : rank),
          " and none on ", rank_text(all[0][has_grad].item<bool>() ? rank : 0),
          "; it must have one on all ranks or on none");
      TORCH_CHECK_VALUE(
          all[rank][here].equal(all[0][here]), "[", kMuonName, "] ", text_of(*updates[i]), " has ",
          "other options, sizes or placements on ", rank_text(rank), " than on ", rank_text(0),
          "; they must be the same on all ranks");
    }
  }
  TORCH_CHECK_VALUE(
      false, "[", kMuonName, "] set_exchange_numel was called with other numbers on some ranks");
}

} // namespace

std::vector<int64_t> MatrixUpdate::sizes() const {
  return spec ? spec->sizes : param.sizes().vec();
}

at::Device MatrixUpdate::device() const {
  return !spec || spec->mesh.device_type() == param.device().type()
             ? param.device()
             : c10::impl::VirtualGuardImpl(spec->mesh.device_type()).getDevice();
}

void check_options(const MuonOptions& options) {
  const auto check = [](const char* name, double value, bool is_good, const char* wanted) {
    check_option(kMuonName, name, value, is_good, wanted);
  };
  const auto check_positive = [&](const char* name, double value) {
    check(name, value, value >= 0, "0 or more");
  };
  check_positive("lr", options.lr());
  check_positive("momentum", options.momentum());
  check_positive("weight_decay", options.weight_decay());
  check_positive("eps", options.eps());
  check_positive("adamw_eps", options.adamw_eps());
  check_betas(kMuonName, options.betas());
  const auto steps = static_cast<double>(options.ns_steps());
  check("ns_steps", steps, steps >= 0 && steps < 100, "from 0 to 99");
  const auto blocks = static_cast<double>(options.blocks());
  check("blocks", blocks, blocks > 0, "above 0");
  const auto dtype = options.ns_dtype();
  TORCH_CHECK_VALUE(
      dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat || dtype == at::kDouble,
      "[", kMuonName, "] ns_dtype is ", dtype, ", not BFloat16, Half, Float or Double");
}

void check(const MatrixUpdate& update) {
  check_options(*update.options);
  const auto rows = num_rows(update.sizes());
  TORCH_CHECK_VALUE(
      rows % update.options->blocks() == 0, "[", kMuonName, "] ", text_of(update), " has ", rows,
      " rows, which ", update.options->blocks(), " blocks cannot share");
  TORCH_CHECK_VALUE(
      !update.param.is_complex(), "[", kMuonName, "] ", text_of(update),
      " is complex; Muon updates real matrices only");
}

void compare_ranks(
    const std::vector<MatrixUpdate>& updates, int64_t exchange_numel, bool with_gpus) {
  std::vector<bool> is_done(updates.size());
  for (const auto first : c10::irange(updates.size())) {
    const auto device = updates[first].device();
    if (is_done[first] || !updates[first].spec || (!device.is_cpu() && !with_gpus)) {
      continue;
    }
    const auto& mesh = updates[first].spec->mesh;
    std::vector<const MatrixUpdate*> members;
    std::vector<int64_t> fingerprints;
    auto sum = add_to_hash(kEmptyHash, static_cast<uint64_t>(exchange_numel));
    for (auto i = first; i < updates.size(); ++i) {
      if (updates[i].spec && updates[i].spec->mesh == mesh) {
        is_done[i] = true;
        members.push_back(&updates[i]);
        const auto fingerprint = fingerprint_of(updates[i]);
        fingerprints.push_back(static_cast<int64_t>(fingerprint));
        sum = add_to_hash(sum, fingerprint);
      }
    }
    const auto group = mesh.whole_group();
    const auto sums = gathered(group, device, {static_cast<int64_t>(sum)});
    if (!sums.eq(sums[0]).all().item<bool>()) { // every rank sees the same sums
      explain(group, device, members, std::move(fingerprints));
    }
  }
}

} // namespace fsdp::detail
