# Compiler settings of every target here; nothing of it is exported.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

find_program(FSDP_CCACHE ccache)
if(FSDP_CCACHE)
  # The sloppiness lets ccache work together with the precompiled header; by the
  # compiler's own list of dependencies it need not preprocess everything once more.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_DEPEND=1 CCACHE_SLOPPINESS=pch_defines,time_macros ${FSDP_CCACHE})
endif()

add_library(fsdp_build_flags INTERFACE)
target_compile_options(
  fsdp_build_flags
  INTERFACE -Wall -Wextra -Wpedantic -Wno-missing-field-initializers
            # One -fPIC for all: GCC drops a precompiled header made with other flags.
            -fPIC
            $<$<BOOL:${FSDP_WERROR}>:-Werror>
            $<$<CXX_COMPILER_ID:GNU>:-Winvalid-pch -Werror=invalid-pch -fpch-preprocess>)
if(FSDP_SANITIZE)
  target_compile_options(
    fsdp_build_flags INTERFACE -fsanitize=${FSDP_SANITIZE} -fno-omit-frame-pointer)
  target_link_options(fsdp_build_flags INTERFACE -fsanitize=${FSDP_SANITIZE})
endif()
