# fsdp_add_test(NAME LABELS... [TIMEOUT seconds] SOURCES...): one GoogleTest binary of a
# room. Every test has a time limit and labels:
#   unit     no ranks            ranks    ranks as threads
#   process  ranks as processes  parity   against Python's torch
#   package  the installed package        cli  the command line tool
#   gpu      needs a GPU, skipped elsewhere

find_package(GTest REQUIRED)
include(GoogleTest)

# Tests compile for a third less than at -O2, and what they test is not built here. From 13 on
# GCC does not take the precompiled header then.
function(fsdp_link_test name)
  target_compile_options(
    ${name}
    PRIVATE $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-O1>)
  target_link_libraries(${name} PRIVATE fsdp_objects fsdp_test_support)
  fsdp_add_precompiled(${name})
endfunction()

function(fsdp_add_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "LABELS;SOURCES" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  fsdp_link_test(${name})
  gtest_discover_tests(
    ${name}
    DISCOVERY_TIMEOUT 120
    PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT})
endfunction()

# A whole binary is one test on a GPU, and has it for itself: to open the device takes longer
# than most tests, and some measure time or memory.
function(fsdp_add_whole_test test binary)
  add_test(NAME ${test} COMMAND ${binary} ${ARGN})
  set_tests_properties(
    ${test}
    PROPERTIES LABELS gpu TIMEOUT 300 RUN_SERIAL TRUE
               SKIP_REGULAR_EXPRESSION "there is no GPU here")
endfunction()

# fsdp_add_gpu_test(NAME SOURCES...): a binary that needs a GPU.
function(fsdp_add_gpu_test name)
  cmake_parse_arguments(arg "" "" "SOURCES" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  fsdp_link_test(${name})
  if(TORCH_CUDA_LIBRARIES)
    target_compile_definitions(${name} PRIVATE FSDP_TEST_CUDA)
  endif()
  fsdp_add_whole_test(${name} ${name})
endfunction()

# fsdp_also_on_gpu(NAME [EXCEPT patterns...]): the tests of the binary NAME once more, with
# models and batches on a GPU; only where torch has CUDA. PLACED: and again with every gather
# placed.
function(fsdp_also_on_gpu name)
  cmake_parse_arguments(arg "PLACED" "" "EXCEPT" ${ARGN})
  list(JOIN arg_EXCEPT ":" except)
  if(TORCH_CUDA_LIBRARIES)
    fsdp_add_whole_test(OnGpu.${name} ${name} --gtest_filter=-${except})
    set_tests_properties(OnGpu.${name} PROPERTIES ENVIRONMENT FSDP_TEST_DEVICE=cuda)
    if(arg_PLACED)
      fsdp_add_whole_test(OnGpuPlaced.${name} ${name} --gtest_filter=-${except})
      set_tests_properties(
        OnGpuPlaced.${name}
        PROPERTIES ENVIRONMENT "FSDP_TEST_DEVICE=cuda;FSDP_PLACED_GATHERS=always")
    endif()
  endif()
endfunction()
