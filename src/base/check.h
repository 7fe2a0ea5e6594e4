#pragma once

#include <c10/util/StringUtil.h>

#include <fsdp/error.h>

/// Throws fsdp::Type with a message made of the pieces. For mistakes of the
/// caller use TORCH_CHECK_VALUE, for our own TORCH_INTERNAL_ASSERT.
#define FSDP_THROW(Type, ...) \
  throw ::fsdp::Type(         \
      {static_cast<const char*>(__func__), __FILE__, __LINE__}, ::c10::str(__VA_ARGS__))

#define FSDP_CHECK_AS(Type, condition, ...) \
  do {                                      \
    if (C10_UNLIKELY(!(condition))) {       \
      FSDP_THROW(Type, __VA_ARGS__);        \
    }                                       \
  } while (false)
