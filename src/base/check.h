#pragma once

#include <c10/util/StringUtil.h>

#include <string>

#include <fsdp/error.h>

/// Throws fsdp::Type with a message made of the pieces. Use TORCH_CHECK_VALUE for a caller's
/// mistake and TORCH_INTERNAL_ASSERT for a bug of this library.
#define FSDP_THROW(Type, ...) \
  throw ::fsdp::Type(         \
      {static_cast<const char*>(__func__), __FILE__, __LINE__}, ::c10::str(__VA_ARGS__))

namespace fsdp::detail {

/// Returns the message of the exception being handled, without c10's backtrace. Only for
/// catch blocks.
std::string current_exception_text();

} // namespace fsdp::detail

#define FSDP_CHECK_AS(Type, condition, ...) \
  do {                                      \
    if (C10_UNLIKELY(!(condition))) {       \
      FSDP_THROW(Type, __VA_ARGS__);        \
    }                                       \
  } while (false)
