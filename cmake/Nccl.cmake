# Compiles nccl_backend.cpp if torch has CUDA and nccl.h is found, else no_nccl.cpp, which defines
# the same functions.

set(use_nccl OFF)
if(TORCH_CUDA_LIBRARIES AND NOT FSDP_NCCL STREQUAL "OFF")
  find_path(FSDP_NCCL_INCLUDE nccl.h HINTS ENV NCCL_HOME PATH_SUFFIXES include)
  if(NOT FSDP_NCCL_INCLUDE AND FSDP_PYTHON)
    # The CUDA torch of pip depends on a package that contains NCCL.
    execute_process(
      COMMAND ${FSDP_PYTHON} -c
              "import nvidia.nccl as n; print(list(n.__path__)[0] + '/include')"
      OUTPUT_VARIABLE nccl_include OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(EXISTS "${nccl_include}/nccl.h")
      set(FSDP_NCCL_INCLUDE ${nccl_include} CACHE PATH "" FORCE)
    endif()
  endif()
  if(FSDP_NCCL_INCLUDE)
    set(use_nccl ON)
  endif()
endif()
if(FSDP_NCCL STREQUAL "ON" AND NOT use_nccl)
  message(FATAL_ERROR "FSDP_NCCL=ON, but torch has no CUDA or nccl.h was not found")
endif()

if(use_nccl)
  target_sources(fsdp_objects PRIVATE process_group/nccl/nccl_backend.cpp)
  set_source_files_properties(
    process_group/nccl/nccl_backend.cpp PROPERTIES INCLUDE_DIRECTORIES "${FSDP_NCCL_INCLUDE}")
else()
  target_sources(fsdp_objects PRIVATE process_group/nccl/no_nccl.cpp)
endif()
message(STATUS "nccl backend: ${use_nccl}")
