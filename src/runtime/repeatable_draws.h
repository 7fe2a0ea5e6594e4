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
// A piece of code that is run once more has to draw the same numbers, or the
// gradient of a dropout is that of another mask. Alone in its process, a rank
// sets the states of torch's default generators back to where they were, and
// forward again afterwards; the first run draws what it would draw anyway.
//
// Ranks that are threads share these generators, and draw in between each
// other's draws. There both runs draw from generators of their own instead,
// made from one number of the shared ones. A run that draws nothing takes none.

/// How a run that begins now can draw the same numbers again.
class RepeatableDraws {
 public:
  /// On the CPU and these devices. `shared`: other threads draw as well.
  RepeatableDraws(const std::vector<c10::Device>& devices, bool shared);

  /// To be kept during the first run.
  std::unique_ptr<SeededDraws> first() const;

  /// To be kept during another.
  class Again {
   public:
    explicit Again(const RepeatableDraws& draws);
    ~Again();
    Again(const Again&) = delete;
    Again& operator=(const Again&) = delete;

   private:
    std::vector<std::pair<at::Generator, at::Tensor>> before_;
    std::unique_ptr<SeededDraws> own_;
  };

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
  SeededDraws::Seed seed_; // where they are shared
};

} // namespace fsdp::detail
