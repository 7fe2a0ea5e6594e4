# fsdp_add_test(NAME LABELS... [TIMEOUT seconds] [PROPERTIES...] SOURCES...): one GoogleTest
# binary of a room. Every test has a time limit and labels:
#   unit     no ranks            ranks    ranks as threads
#   process  ranks as processes  parity   against Python's torch
#   package  the installed package        cli  the command line tool
#   gpu      needs a GPU, skipped elsewhere

find_package(GTest REQUIRED)
include(GoogleTest)

function(fsdp_add_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "LABELS;SOURCES;PROPERTIES" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE fsdp_objects fsdp_test_support)
  fsdp_add_precompiled(${name})
  gtest_discover_tests(
    ${name}
    DISCOVERY_TIMEOUT 120
    PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} ${arg_PROPERTIES})
endfunction()

# fsdp_also_on_gpu(NAME [EXCEPT patterns...]): the tests of the binary NAME once more, as
# OnGpu.*, with models and batches on a GPU; only where torch has CUDA.
function(fsdp_also_on_gpu name)
  cmake_parse_arguments(arg "" "" "EXCEPT" ${ARGN})
  list(JOIN arg_EXCEPT ":" except)
  if(TORCH_CUDA_LIBRARIES)
    gtest_discover_tests(
      ${name}
      TEST_PREFIX OnGpu.
      TEST_FILTER "-${except}"
      DISCOVERY_TIMEOUT 120
      PROPERTIES LABELS gpu TIMEOUT 120 ENVIRONMENT FSDP_TEST_DEVICE=cuda)
  endif()
endfunction()
