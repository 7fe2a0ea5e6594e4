#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::cli {

/// Trains two small matrices A and B beside a projection W, which stays as it is: W x becomes
/// W x + scale * B A x. (LoRA, "low-rank adaptation".)
struct Lora {
  int64_t rank = 0;                 // rows of A and columns of B
  double alpha = 0;                 // `scale` times `rank`
  std::vector<std::string> targets; // names of the projections, "q_proj" for example

  double scale() const {
    return alpha / static_cast<double>(rank);
  }
  bool trains(const std::string& projection) const;

  /// Throws ConfigError that begins with `about` if a number is out of range, or if there is no
  /// such projection.
  void check(const std::string& about) const;

  /// "rank=16,alpha=32,targets=q_proj+v_proj"
  std::string str() const;
  /// Reads such a text, in which only the rank must be given. Nothing for "none". Throws
  /// ConfigError that names --lora if the text is something else.
  static std::optional<Lora> parse(const std::string& text);
};

/// The names of all projections.
const std::vector<std::string>& lora_projections();

/// Whether the parameter with this name is one of LoRA's matrices.
bool is_adapter(std::string_view name);

} // namespace fsdp::cli
