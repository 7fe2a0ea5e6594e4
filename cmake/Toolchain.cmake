# Compiler settings of every target of this project. None of them is exported.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/${CMAKE_INSTALL_LIBDIR})
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

# Uses the quickest linker that is installed: the default one takes seconds per test binary.
include(CheckLinkerFlag)
foreach(linker lld mold)
  check_linker_flag(CXX -fuse-ld=${linker} FSDP_HAVE_${linker})
  if(FSDP_HAVE_${linker})
    add_link_options(-fuse-ld=${linker})
    break()
  endif()
endforeach()

add_library(fsdp_build_flags INTERFACE)
target_compile_options(
  fsdp_build_flags
  INTERFACE -Wall -Wextra -Wpedantic -Wno-missing-field-initializers
            # -fPIC for all targets: GCC ignores a precompiled header made with other flags.
            -fPIC
            $<$<BOOL:${FSDP_WERROR}>:-Werror>
            # GCC takes the files of a unit for headers, in which a field of a type from an
            # anonymous namespace would be a mistake.
            $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>
            # clang compares the sizes of headers with those that it precompiled, but not their times: an
            # update of the system gives its headers other times, even if they are the same.
            "$<$<CXX_COMPILER_ID:Clang>:SHELL:-Xclang -fno-pch-timestamp>"
            $<$<CXX_COMPILER_ID:GNU>:-Winvalid-pch -Werror=invalid-pch -fpch-preprocess>)
if(FSDP_SANITIZE)
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_FLAGS -fsanitize=${FSDP_SANITIZE})
  check_cxx_source_compiles("int main() {}" FSDP_HAVE_SANITIZER)
  unset(CMAKE_REQUIRED_FLAGS)
  if(NOT FSDP_HAVE_SANITIZER)
    unset(FSDP_HAVE_SANITIZER CACHE) # it may be installed by the next run
    message(FATAL_ERROR "The compiler cannot link with -fsanitize=${FSDP_SANITIZE}. "
                        "For clang 19, Debian has the sanitizers in libclang-rt-19-dev.")
  endif()
  target_compile_options(
    fsdp_build_flags INTERFACE -fsanitize=${FSDP_SANITIZE} -fno-omit-frame-pointer)
  target_compile_definitions(fsdp_build_flags INTERFACE FSDP_SANITIZED)
  target_link_options(fsdp_build_flags INTERFACE -fsanitize=${FSDP_SANITIZE})
endif()
