#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <utility>
#include <vector>

#include "runtime/seeded_draws.h"

namespace fsdp::detail {

// Note [Random numbers that repeat]
//
// Code that runs a second time must draw the same random numbers. Otherwise, for example, the
// gradient of a dropout belongs to another mask. A rank that is alone in its process sets torch's
// default generators back to their earlier states for the second run, and restores them afterwards.
// So the first run draws the same numbers as without this class.
//
// Ranks that are threads share the default generators, and their draws interleave. There both runs
// draw from generators of their own, which are seeded with one number from the default generator.
// A run that draws nothing takes no number.

/// Lets a run that begins now draw the same random numbers again later.
class RepeatableDraws {
 public:
  /// Covers the CPU and `devices`. `shared` means that other threads draw from the same generators.
  RepeatableDraws(const std::vector<c10::Device>& devices, bool shared);

  /// Keep the result alive during the first run. It may be null.
  std::unique_ptr<SeededDraws> first() const;

  /// Keep it alive during a repeated run.
  class RepeatGuard {
   public:
    explicit RepeatGuard(const RepeatableDraws& draws);
    ~RepeatGuard();
    RepeatGuard(const RepeatGuard&) = delete;
    RepeatGuard& operator=(const RepeatGuard&) = delete;

   private:
    std::vector<std::pair<at::Generator, at::Tensor>> before_;
    std::unique_ptr<SeededDraws> own_;
  };

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
  SeededDraws::Seed seed_; // only if the generators are shared
};

} // namespace fsdp::detail
